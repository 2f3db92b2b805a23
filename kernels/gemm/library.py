"""Implements the kernel `library`: torch's matrix product, which is cuBLAS on CUDA, and oneDNN or MKL on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel

OPERAND_RULES = {
    "residual is None or bias is None": "None beside a bias, because torch has no call that adds both before it rounds",
    "precision == 'ieee' or device != 'cpu'": "ieee, because torch has no TF32 on a CPU",
}
"""The conditions (`holds`) on the arguments of torch's matrix products."""


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, precision: str, c: Tensor | None
) -> Tensor:
    """Computes the op gemm with one call of torch.  `precision="tf32"` allows TF32 for this call only."""
    addend = residual if bias is None else bias
    if precision == "ieee":
        return torch.mm(a, b, out=c) if addend is None else torch.addmm(addend, a, b, out=c)
    old_tf32_flag = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return product(a, b, bias, residual, "ieee", c)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = old_tf32_flag


@kernel(backend="torch", holds=OPERAND_RULES, unsupported=padded_rows_refused, allocates=True)
def library(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, *, residual: Tensor | None, precision: str
) -> Tensor:
    """Computes `a @ b + bias` or `a @ b + residual` by `torch.mm` or `torch.addmm`.  Operands may have any strides."""
    return product(a, b, bias, residual, precision, c)
