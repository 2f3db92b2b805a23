"""WRONG.  A code is split into its sign and its size, and the size is the `abs` of an int8.  The size of -128 does
not fit: abs(-128) is -128, times the sign -1 it becomes +128.  Symmetric quantisers stop at -127; other checkpoints
have -128."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_w8a16", name="sign_and_size", role="optimized", backend="torch")
def gemm_w8a16(a, b, scale, bias=None):
    size = b.abs().float()
    weight = torch.where(b < 0, -size, size)
    product = (a.float() @ weight) * scale.float()
    if bias is not None:
        product += bias.float()
    return product.to(torch.bfloat16)
