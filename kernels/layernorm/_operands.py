"""Checks of the operands of all layernorm kernels, and the traffic of those with one pass."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_last_dim_contiguous
from rooflab.kernels.registry import Arguments
from rooflab.kernels.rmsnorm import _operands
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, int]:
    """T and H.  Raises `ValueError` unless x is (T, H) float with contiguous rows, and weight and bias (H,) like it."""
    T, H = _operands.check_operands(x, weight)
    if bias is not None:
        check_shape("bias", bias, H)
        check_dtype("bias", bias, x.dtype)
        check_last_dim_contiguous("bias", bias)
    return T, H


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written; weight and bias come from L2 after the first row."""
    return Traffic(nbytes(inputs.x, inputs.weight, inputs.bias), nbytes(inputs.x))
