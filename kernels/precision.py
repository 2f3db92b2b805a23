"""torch's matmuls as exact as their dtypes say, in every process that checks, times or serves."""

from __future__ import annotations

import torch


def pin_matmul_precision() -> None:
    """fp32 products in IEEE arithmetic, and 16-bit ones summed in fp32 throughout.

    torch's defaults on CUDA allow cuBLAS to reduce split-K partials in 16 bits, and an environment variable that some
    images set allows TF32: a library kernel would then be faster for being less exact than the op.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def matmul_precision() -> str:
    """What is in force, for a record: `highest`, and `+16-bit reductions` where they are allowed."""
    allowed = (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        or torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    )
    return torch.get_float32_matmul_precision() + ("+16-bit reductions" if allowed else "")
