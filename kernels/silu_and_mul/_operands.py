"""Check of the operand of all silu_and_mul kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous, check_shape


def check_operands(x: torch.Tensor) -> tuple[int, int]:
    """T and I.  Raises `ValueError` unless x is (T, 2 I) float with contiguous rows."""
    check_shape("x", x, None, None)
    check_float("x", x)
    check_last_dim_contiguous("x", x)
    T, width = x.shape
    if width % 2:
        raise ValueError(f"x: expected an even last dimension, gate and up, got {width}")
    return T, width // 2
