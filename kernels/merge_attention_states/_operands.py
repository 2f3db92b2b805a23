"""Guards that every merge_attention_states launcher shares."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_dtype, check_float, check_last_dim_contiguous, check_shape


def check_operands(outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Raises `ValueError` on tensors that are not outs (P, T, H, D) and lses (P, T, H) fp32, P at least 1, on one
    device."""
    check_float("outs", outs)
    check_shape("outs", outs, None, None, None, None)
    check_last_dim_contiguous("outs", outs)
    check_shape("lses", lses, *outs.shape[:3])
    check_dtype("lses", lses, torch.float32)
    if outs.shape[0] == 0:
        raise ValueError("outs: expected at least one part, got none")
    if lses.device != outs.device:
        raise ValueError(f"lses: expected a tensor on {outs.device}, got {lses.device}")
