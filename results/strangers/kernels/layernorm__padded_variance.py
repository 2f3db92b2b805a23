"""WRONG.  The lanes behind the end of a row are loaded as 0 and then centred, so each of them adds mean^2 to the
sum of the variance.  There are none when H is a power of two.  With H = 576 or 5120 and a mean that is not 0, all
is off."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def norm_rows(x, weight, bias, out, stride, H, eps, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < H
    value = tl.load(x + row * stride + at, mask, 0.0).to(tl.float32)
    centred = value - tl.sum(value, 0) / H
    variance = tl.sum(centred * centred, 0) / H
    result = centred / tl.sqrt(variance + eps) * tl.load(weight + at, mask, 0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + at, mask, 0.0).to(tl.float32)
    tl.store(out + row * H + at, result, mask)


@register(op="layernorm", name="padded_variance", role="optimized", backend="triton")
def layernorm(x, weight, bias=None, eps=1e-5):
    T, H = x.shape
    out = torch.empty((T, H), dtype=x.dtype, device=x.device)
    if T and H:
        block = triton.next_power_of_2(H)
        norm_rows[(T,)](
            x, weight, weight if bias is None else bias, out, x.stride(0), H, eps, BIAS=bias is not None, BLOCK=block
        )
    return out
