"""Check of the operands of all merge_attention_states kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape


def check_operands(outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Raises `ValueError` unless outs is (P, T, H, D), lses (P, T, H) fp32, P >= 1, both on one device."""
    check_float("outs", outs)
    check_shape("outs", outs, None, None, None, None)
    check_last_dim_contiguous("outs", outs)
    check_shape("lses", lses, *outs.shape[:3])
    check_dtype("lses", lses, torch.float32)
    if outs.shape[0] == 0:
        raise ValueError("outs: expected at least one part, got none")
    if lses.device != outs.device:
        raise ValueError(f"lses: expected a tensor on {outs.device}, got {lses.device}")
