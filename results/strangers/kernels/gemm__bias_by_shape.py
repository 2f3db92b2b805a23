"""WRONG.  The kernel takes a bias for rows as well as for columns, and tells them apart by the length: M values are
added to rows, N values to columns.  If M is N (as many tokens as outputs), the bias of the columns is added to the
rows."""

import torch

from rooflab.kernels.registry import register


@register(op="gemm", name="bias_by_shape", role="optimized", backend="torch")
def gemm(a, b, bias=None, *, residual=None):
    M = a.shape[0]
    product = torch.matmul(a.double(), b.double())
    if bias is not None:
        product += bias.double()[:, None] if len(bias) == M else bias.double()
    if residual is not None:
        product += residual.double()
    return product.to(a.dtype)
