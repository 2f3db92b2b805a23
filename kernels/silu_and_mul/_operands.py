"""Check of the operand of gated activations, and the traffic of kernels with one pass."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.kernels._rows import written_bytes
from rooflab.kernels.registry import Arguments
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(x: torch.Tensor) -> tuple[int, int]:
    """T and I.  Raises `ValueError` unless x is (T, 2 I) float with contiguous rows."""
    check_shape("x", x, None, None)
    check_float("x", x)
    check_last_dim_contiguous("x", x)
    T, width = x.shape
    if width % 2:
        raise ValueError(f"x: expected an even last dimension, gate and up, got {width}")
    return T, width // 2


def traffic(inputs: Arguments) -> Traffic:
    """gate and up are read, the result is written."""
    x = inputs.x
    return Traffic(nbytes(x), written_bytes(x, x.numel() // 2, inputs.quantize))
