"""Checks of the operands of all rope kernels, and their outputs."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape, output


def check_operands(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[int, int, int, int]:
    """T, H, H_kv and D.

    Raises `ValueError` unless q is (T, H, D) and k (T, H_kv, D) of one float dtype with an even D, cos and sin
    (max_position, D/2) fp32 and positions (T,) int64.  q and k may be strided views of a packed projection.
    """
    check_shape("q", q, None, None, None)
    T, H, D = q.shape
    if D % 2:
        raise ValueError(f"q: expected an even head_dim, got {D}")
    check_shape("k", k, T, None, D)
    check_float("q", q)
    check_dtype("k", k, q.dtype)
    check_last_dim_contiguous("q", q)
    check_last_dim_contiguous("k", k)
    check_shape("cos", cos, None, D // 2)
    check_shape("sin", sin, cos.shape[0], D // 2)
    check_dtype("cos", cos, torch.float32)
    check_dtype("sin", sin, torch.float32)
    check_shape("positions", positions, T)
    check_dtype("positions", positions, torch.int64)
    check_last_dim_contiguous("cos", cos)
    check_last_dim_contiguous("sin", sin)
    check_last_dim_contiguous("positions", positions)
    return T, H, k.shape[1], D


def outputs(
    out: tuple[torch.Tensor, torch.Tensor] | None, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated q and k, from `out` or new tensors.  Raises `ValueError` where `out` does not fit."""
    q_out, k_out = out or (None, None)
    return output(q_out, tuple(q.shape), q), output(k_out, tuple(k.shape), k)
