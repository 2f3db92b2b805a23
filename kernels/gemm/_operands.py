"""Checks of the operands of all gemm kernels, and the traffic of those that read each operand once."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.kernels.registry import Arguments
from rooflab.reference.gemm import check_precision
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    precision: str = "ieee",
) -> tuple[int, int, int]:
    """M, N and K.

    Raises `ValueError` unless a is (M, K), b (K, N), bias (N,), residual (M, N), all of one float dtype, and
    `precision` is `ieee`, or `tf32` with fp32 operands.
    """
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
    if residual is not None:
        check_shape("residual", residual, M, N)
        check_dtype("residual", residual, a.dtype)
        check_last_dim_contiguous("residual", residual)
    check_precision(a, precision)
    return M, N, K


def traffic(inputs: Arguments) -> Traffic:
    """Every operand once: true of a GEMV, and nearly true of the best tile order."""
    a, b = inputs.a, inputs.b
    return Traffic(
        read_bytes=nbytes(a, b, inputs.bias, inputs.residual), write_bytes=a.shape[0] * b.shape[1] * a.element_size()
    )
