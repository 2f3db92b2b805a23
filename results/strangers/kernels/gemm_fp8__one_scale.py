"""WRONG.  Whether there is one scale for all of A is told by its number of elements.  With block scales, one token
and K up to 128, A's scales are a (1, 1), and the kernel takes both operands for tensor-wise scaled.  B has a scale
for each 128 columns, and asking these for their one value raises an exception."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm_fp8", name="one_scale", role="optimized", backend="torch")
def gemm_fp8(a, b, a_scale, b_scale, bias=None, *, fast_accum=False):
    M, N = a.shape[0], b.shape[1]
    if a_scale.numel() == 1:
        product = (a.float() @ b.float()) * (a_scale.item() * b_scale.item())
    else:
        product = torch.zeros(M, N, dtype=torch.float32, device=a.device)
        for group in range(b_scale.shape[0]):
            part = slice(128 * group, 128 * group + 128)
            wide = b_scale[group].repeat_interleave(128)[:N]
            product += (a[:, part].float() @ b[part].float()) * a_scale[:, group, None] * wide
    if bias is not None:
        product += bias.float()
    return product.to(torch.bfloat16)
