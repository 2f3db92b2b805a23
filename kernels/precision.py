"""Sets torch's matmuls to exact arithmetic in each process that checks, measures or serves."""

from __future__ import annotations

import torch


def pin_matmul_precision() -> None:
    """Sets torch to compute fp32 matmuls in IEEE arithmetic and to sum 16-bit matmuls in fp32.

    By default cuBLAS may add partial sums in 16 bits, and some container images allow TF32.  Then torch would be faster
    only because it is less exact."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def matmul_precision() -> str:
    """Returns the name of the current precision: `highest`, plus `+16-bit reductions` if torch allows them."""
    allows_reductions = (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        or torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    )
    return torch.get_float32_matmul_precision() + ("+16-bit reductions" if allows_reductions else "")
