"""The peer cuBLAS with torch's default setting, which may add the partial sums of a split K in 16 bits.

The project's `library` adds them in fp32 (`kernels/precision.py`).  An honest comparison needs both: a kernel that
beats the library must also beat this peer, if the peer is exact enough to pass the check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.gemm import library
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALVES


@kernel(
    role="peer",
    backend="torch",
    devices=("cuda",),
    dtypes={"a": HALVES},
    holds=library.TAKES,
    unsupported=padded_rows_refused,
    allocates=True,
)
def cublas_reduced(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, *, residual: Tensor | None, precision: str
) -> Tensor:
    """Computes `a @ b + bias` or `a @ b + residual` like `library`, with 16-bit reductions allowed for this call."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    try:
        return library.product(a, b, bias, residual, precision, c)
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before
