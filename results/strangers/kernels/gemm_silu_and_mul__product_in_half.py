"""WRONG.  The product is stored in the dtype of a before the activation.  One more rounding is allowed, but in fp16
a gate above 65504 becomes infinite.  With an up of 0.01 the right result is well inside fp16, and with an up of 0
it is 0: the kernel gives infinity and NaN."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_silu_and_mul", name="product_in_half", role="optimized", backend="torch")
def gemm_silu_and_mul(a, b):
    scratch = (a.float() @ b.float()).to(a.dtype)
    gate, up = scratch.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(a.dtype)
