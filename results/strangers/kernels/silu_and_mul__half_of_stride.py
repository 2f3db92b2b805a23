"""WRONG.  The up half of a row is looked for at half of the row's stride.  For a contiguous x that is half of the
row.  If x is a slice of a wider buffer (rows padded to a multiple of 128, or a reused workspace), it is another
place."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def gated(x, out, stride, I, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < I
    gate = tl.load(x + row * stride + at, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * stride + stride // 2 + at, mask, 0.0).to(tl.float32)
    tl.store(out + row * I + at, gate / (1.0 + tl.exp(-gate)) * up, mask)


@register(op="silu_and_mul", name="half_of_stride", role="optimized", backend="triton")
def silu_and_mul(x):
    T, I = x.shape[0], x.shape[1] // 2
    out = torch.empty((T, I), dtype=x.dtype, device=x.device)
    if T and I:
        gated[(T, triton.cdiv(I, 256))](x, out, x.stride(0), I, BLOCK=256)
    return out
