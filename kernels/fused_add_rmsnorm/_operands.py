"""Checks of the operands of all fused_add_rmsnorm kernels, their outputs, and the traffic of those with one pass."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous, output
from rooflab.kernels._rows import row_outputs, written_bytes
from rooflab.kernels.registry import Arguments
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

Out = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The normed rows, the new residual, and the scales of quantised rows."""


def check_operands(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """T and H.  Raises `ValueError` unless x and residual are (T, H), weight (H,), one dtype, rows contiguous."""
    check_shape("x", x, None, None)
    check_float("x", x)
    check_last_dim_contiguous("x", x)
    T, H = x.shape
    check_shape("residual", residual, T, H)
    check_dtype("residual", residual, x.dtype)
    check_last_dim_contiguous("residual", residual)
    check_shape("weight", weight, H)
    check_dtype("weight", weight, x.dtype)
    check_last_dim_contiguous("weight", weight)
    return T, H


def outputs(
    out: Out | None, shape: tuple[int, int], like: torch.Tensor, quantize: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The normed rows, the new residual, and the scales if rows are quantised: from `out`, or new.

    Raises `ValueError` where `out` does not fit.
    """
    if out is None:
        normed, scale = row_outputs(None, shape, like, quantize)
        return normed, output(None, shape, like), scale
    first, new_residual, *scales = out
    normed, scale = row_outputs((first, *scales) if quantize else first, shape, like, quantize)
    return normed, output(new_residual, shape, like), scale


def returned(normed: torch.Tensor, new_residual: torch.Tensor, scale: torch.Tensor | None) -> Out:
    """The outputs without the scales, if there are none."""
    return (normed, new_residual) if scale is None else (normed, new_residual, scale)


def traffic(inputs: Arguments) -> Traffic:
    """Two arrays are read and two written; the weight comes from L2 or a cache after the first row."""
    x = inputs.x
    written = nbytes(x) + written_bytes(x, x.numel(), inputs.quantize)
    return Traffic(nbytes(x, inputs.residual, inputs.weight), written)
