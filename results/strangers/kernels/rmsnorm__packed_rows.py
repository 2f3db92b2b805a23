"""WRONG.  A row of x begins at row * H, as if rows lay close together.  That is so for a fresh activation.  When x
is a slice of a wider tensor (the q part of q|k|v), its row stride is larger, and all rows but the first are
misread."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def norm_rows(x, weight, out, H, eps, offset, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < H
    raw = tl.load(x + row * H + at, mask, 0.0)
    value = raw.to(tl.float32)
    scaled = value / tl.sqrt(tl.sum(value * value, 0) / H + eps)
    if ROUND:
        scaled = scaled.to(raw.dtype).to(tl.float32)
    w = tl.load(weight + at, mask, 0.0).to(tl.float32) + offset
    tl.store(out + row * H + at, scaled * w, mask)


@register(op="rmsnorm", name="packed_rows", role="optimized", backend="triton")
def rmsnorm(x, weight, eps=1e-6, *, weight_offset=0.0, round_first=False):
    T, H = x.shape
    out = torch.empty((T, H), dtype=x.dtype, device=x.device)
    if T and H:
        norm_rows[(T,)](x, weight, out, H, eps, weight_offset, round_first, triton.next_power_of_2(H))
    return out
