"""WRONG.  For one token the row is cut into 8 parts of I // 8 columns for 8 programs, to fill the GPU; with more
tokens a program has a whole row.  For one token and an I that 8 does not divide (a shard of 101 columns, say) the last
I % 8 columns are never written."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def gated(x, out, stride, I, part, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(1) * part + lane
    mask = (lane < part) & (at < I)
    gate = tl.load(x + row * stride + at, mask, 0.0).to(tl.float32)
    up = tl.load(x + row * stride + I + at, mask, 0.0).to(tl.float32)
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * I + at, gate / (1.0 + tl.exp(-inner)) * up, mask)


@register(op="gelu_and_mul", name="decode_parts", role="optimized", backend="triton")
def gelu_and_mul(x):
    T, I = x.shape[0], x.shape[1] // 2
    out = torch.empty((T, I), dtype=x.dtype, device=x.device)
    if T and I:
        parts = 8 if T == 1 and I >= 8 else 1
        gated[(T, parts)](x, out, x.stride(0), I, I // parts, triton.next_power_of_2(I // parts))
    return out
