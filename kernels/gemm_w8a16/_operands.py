"""Checks of the operands of all gemm_w8a16 kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.reference.rules import check_dtype, check_shape


def check_operands(
    a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[int, int, int]:
    """M, N and K.

    Raises `ValueError` unless a is (M, K) bf16, b (K, N) int8, scale (N,) of a float dtype and bias (N,) bf16.
    """
    check_shape("a", a, None, None)
    check_shape("b", b, a.shape[1], None)
    check_dtype("b", b, torch.int8)
    N = b.shape[1]
    return check_all_but_b(a, scale, bias, N)[0], N, a.shape[1]


def check_all_but_b(a: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, N: int) -> tuple[int, int]:
    """M and K.  Raises as `check_operands` does."""
    check_shape("a", a, None, None)
    check_dtype("a", a, torch.bfloat16)
    check_shape("scale", scale, N)
    check_float("scale", scale)
    check_last_dim_contiguous("scale", scale)
    if bias is not None:
        check_shape("bias", bias, N)
        check_dtype("bias", bias, torch.bfloat16)
        check_last_dim_contiguous("bias", bias)
    M, K = a.shape
    return M, K


def rows_along_k(a: torch.Tensor) -> str | None:
    """Why the kernel refuses an `a` that is not contiguous along K, or None."""
    if a.shape[1] > 1 and a.stride(1) != 1:
        return f"a: expected stride 1 along K, got strides {a.stride()}; gemm_w8a16/naive takes any"
    return None
