"""Checks of the operands of all rmsnorm kernels, and the traffic of those that read x once."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.kernels._rows import written_bytes
from rooflab.kernels.registry import Arguments
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """T and H.  Raises `ValueError` unless x is (T, H) float with contiguous rows, weight (H,) of its dtype."""
    check_shape("x", x, None, None)
    check_float("x", x)
    check_last_dim_contiguous("x", x)
    T, H = x.shape
    check_shape("weight", weight, H)
    check_dtype("weight", weight, x.dtype)
    check_last_dim_contiguous("weight", weight)
    return T, H


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written; the weight comes from L2 or a cache after the first row."""
    x = inputs.x
    return Traffic(nbytes(x, inputs.weight), written_bytes(x, x.numel(), inputs.quantize))
