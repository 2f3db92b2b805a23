"""WRONG.  One block holds a row, and its size is capped at 8192.  Hidden sizes up to 8192 are right.  With H =
16384 (Llama 3.1 405B) the columns from 8192 on are never summed and never written."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register

MOST = 8192


@triton.jit
def add_and_norm(
    x, residual, weight, out, total, x_stride, r_stride, H, eps, offset, ROUND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < H
    one = tl.load(x + row * x_stride + at, mask, 0.0)
    other = tl.load(residual + row * r_stride + at, mask, 0.0)
    rounded = (one.to(tl.float32) + other.to(tl.float32)).to(one.dtype)
    tl.store(total + row * H + at, rounded, mask)
    value = rounded.to(tl.float32)
    scaled = value / tl.sqrt(tl.sum(value * value, 0) / H + eps)
    if ROUND:
        scaled = scaled.to(one.dtype).to(tl.float32)
    w = tl.load(weight + at, mask, 0.0).to(tl.float32) + offset
    tl.store(out + row * H + at, scaled * w, mask)


@register(op="fused_add_rmsnorm", name="capped_block", role="optimized", backend="triton")
def fused_add_rmsnorm(x, residual, weight, eps=1e-6, *, weight_offset=0.0, round_first=False):
    T, H = x.shape
    out = torch.empty((T, H), dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    if T and H:
        block = min(triton.next_power_of_2(H), MOST)
        add_and_norm[(T,)](
            x,
            residual,
            weight,
            out,
            total,
            x.stride(0),
            residual.stride(0),
            H,
            eps,
            weight_offset,
            ROUND=round_first,
            BLOCK=block,
        )
    return out, total
