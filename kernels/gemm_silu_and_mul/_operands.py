"""Checks of the operands of all gemm_silu_and_mul kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float
from rooflab.reference.rules import check_dtype, check_shape


def check_operands(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, int]:
    """M, I and K.  Raises `ValueError` unless a is (M, K) and b (K, 2 I), of one float dtype."""
    check_shape("a", a, None, None)
    M, K = a.shape
    check_shape("b", b, K, None)
    check_float("a", a)
    check_dtype("b", b, a.dtype)
    if b.shape[1] % 2:
        raise ValueError(f"b: expected an even last dimension, gate and up, got {b.shape[1]}")
    return M, b.shape[1] // 2, K
