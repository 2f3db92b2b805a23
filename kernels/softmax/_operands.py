"""Check of the operand of all softmax kernels, and the traffic of those with one pass."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.kernels.registry import Arguments
from rooflab.reference.rules import check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(x: torch.Tensor) -> tuple[int, int]:
    """T and H.  Raises `ValueError` unless x is (T, H) float with contiguous rows."""
    check_shape("x", x, None, None)
    check_float("x", x)
    check_last_dim_contiguous("x", x)
    T, H = x.shape
    return T, H


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written."""
    return Traffic(nbytes(inputs.x), nbytes(inputs.x))
