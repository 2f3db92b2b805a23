"""Checks of the operands of all fused_add_rmsnorm kernels, and their outputs."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape, output


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
    out: tuple[torch.Tensor, torch.Tensor] | None, shape: tuple[int, int], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed rows and the new residual, from `out` or new.  Raises `ValueError` where `out` does not fit."""
    normed, new_residual = out or (None, None)
    return output(normed, shape, like), output(new_residual, shape, like)
