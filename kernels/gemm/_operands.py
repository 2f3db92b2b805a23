"""What every gemm launcher asks of its operands."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int, int]:
    """M, N and K.  Raises `ValueError` unless a is (M, K), b (K, N), bias (N,), all of one float dtype."""
    check_shape("a", a, None, None)
    M, K = a.shape
    check_shape("b", b, K, None)
    N = b.shape[1]
    check_float("a", a)
    check_dtype("b", b, a.dtype)
    if bias is not None:
        check_shape("bias", bias, N)
        check_dtype("bias", bias, a.dtype)
        check_last_dim_contiguous("bias", bias)
    return M, N, K
