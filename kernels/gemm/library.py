"""torch's own matmul: cuBLAS on CUDA, oneDNN or MKL on the CPU."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.gemm._operands import check_operands
from rooflab.kernels.registry import register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> Traffic:
    """Every operand once, as the best tile order comes close to."""
    return Traffic(read_bytes=nbytes(a, b, bias), write_bytes=a.shape[0] * b.shape[1] * a.element_size())


@register(op="gemm", name="library", role="library", backend="torch", traffic=traffic)
def gemm(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a b + bias with `torch.mm` or `torch.addmm`.

    a: (M, K); b: (K, N); bias: (N,); any strides; returns (M, N). Raises `ValueError` on shapes or dtypes that do not
    fit.
    """
    M, N, _ = check_operands(a, b, bias)
    if out is not None:
        output(out, (M, N), a)
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
