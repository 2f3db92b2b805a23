"""Implements a kernel for comparison: cuBLAS in torch's default mode.

In this mode cuBLAS may split K and add the partial sums in 16 bits.  The kernel `library` adds them in fp32
(`kernels/precision.py`).  16 bits may be faster, so a fair comparison needs both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.gemm import library
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES


@kernel(
    role="peer",
    backend="torch",
    devices=("cuda",),
    dtypes={"a": HALF_DTYPES},
    holds=library.OPERAND_RULES,
    unsupported=padded_rows_refused,
    allocates=True,
)
def cublas_reduced(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, *, residual: Tensor | None, precision: str
) -> Tensor:
    """Computes `a @ b + bias` or `a @ b + residual` by torch.  For this call, torch may add partial sums in 16 bits."""
    mm_flags = torch.backends.cuda.matmul
    saved_flags = mm_flags.allow_bf16_reduced_precision_reduction, mm_flags.allow_fp16_reduced_precision_reduction
    mm_flags.allow_bf16_reduced_precision_reduction = mm_flags.allow_fp16_reduced_precision_reduction = True
    try:
        return library.product(a, b, bias, residual, precision, c)
    finally:
        mm_flags.allow_bf16_reduced_precision_reduction, mm_flags.allow_fp16_reduced_precision_reduction = saved_flags
