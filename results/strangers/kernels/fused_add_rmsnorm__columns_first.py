"""RIGHT.  The first launch has a program for each 64 columns, which adds these columns of all rows, one row after
another, and keeps partial sums of squares in scratch memory.  The second launch has a program for each row, which
reads the new residual back and norms it in blocks from the right to the left."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def add_columns(x, residual, total, scratch, x_stride, r_stride, T, H, parts, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    for t in range(0, T):
        row = tl.cast(t, tl.int64)
        one = tl.load(x + row * x_stride + at, at < H, 0.0)
        other = tl.load(residual + row * r_stride + at, at < H, 0.0)
        rounded = (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)
        tl.store(total + row * H + at, rounded, at < H)
        value = rounded.to(tl.float32)
        tl.store(scratch + row * parts + part, tl.sum(value * value, 0))


@triton.jit
def norm_row(
    total, weight, out, scratch, H, parts, eps, offset, ROUND: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, P)
    squares = tl.sum(tl.load(scratch + row * parts + each, each < parts, 0.0), 0)
    root = tl.sqrt(squares / H + eps)
    for step in range(0, parts):
        at = (parts - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        raw = tl.load(total + row * H + at, at < H, 0.0)
        scaled = raw.to(tl.float32) / root
        if ROUND:
            scaled = scaled.to(raw.dtype).to(tl.float32)
        w = tl.load(weight + at, at < H, 0.0).to(tl.float32) + offset
        tl.store(out + row * H + at, scaled * w, at < H)


@register(op="fused_add_rmsnorm", name="columns_first", role="optimized", backend="triton")
def fused_add_rmsnorm(x, residual, weight, eps=1e-6, *, weight_offset=0.0, round_first=False):
    T, H = x.shape
    out = torch.empty((T, H), dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    if not T or not H:
        return out, total
    parts = triton.cdiv(H, 64)
    scratch = torch.empty((T, parts), dtype=torch.float32, device=x.device)
    add_columns[(parts,)](x, residual, total, scratch, x.stride(0), residual.stride(0), T, H, parts, BLOCK=64)
    norm_row[(T,)](
        total,
        weight,
        out,
        scratch,
        H,
        parts,
        eps,
        weight_offset,
        ROUND=round_first,
        BLOCK=64,
        P=triton.next_power_of_2(parts),
    )
    return out, total
