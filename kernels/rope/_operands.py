"""Checks of the operands of all rope kernels, and their outputs."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous, check_values, output
from rooflab.reference.rope import check_shapes
from rooflab.reference.rules import check_dtype


def check_operands(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[int, int, int, int]:
    """T, H, H_kv and D.

    Raises `ValueError` unless q is (T, H, D) and k (T, H_kv, D) of one float dtype with an even D, cos and sin
    (max_position, D/2) fp32 and positions (T,) int64.  q and k may be strided views of a packed projection.
    """
    check_shapes(q, k, cos, sin, positions)
    T, H, D = q.shape
    check_float("q", q)
    check_dtype("k", k, q.dtype)
    check_last_dim_contiguous("q", q)
    check_last_dim_contiguous("k", k)
    check_dtype("cos", cos, torch.float32)
    check_dtype("sin", sin, torch.float32)
    check_dtype("positions", positions, torch.int64)
    check_last_dim_contiguous("cos", cos)
    check_last_dim_contiguous("sin", sin)
    check_last_dim_contiguous("positions", positions)
    check_values("positions", positions, 0, len(cos) - 1)
    return T, H, k.shape[1], D


def outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated q and k, from `out` or new tensors.  Raises `ValueError` where `out` does not fit."""
    q_out, k_out = out or (None, None)
    return output(q_out, tuple(q.shape), q), output(k_out, tuple(k.shape), k)
