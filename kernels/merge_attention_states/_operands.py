"""Check of the operands of all merge_attention_states kernels."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous
from rooflab.reference.merge_attention_states import check_shapes
from rooflab.reference.rules import check_dtype


def check_operands(outs: torch.Tensor, lses: torch.Tensor) -> None:
    """Raises `ValueError` unless outs is (P, T, H, D), lses (P, T, H) fp32, P >= 1, both on one device."""
    check_float("outs", outs)
    check_shapes(outs, lses)
    check_last_dim_contiguous("outs", outs)
    check_dtype("lses", lses, torch.float32)
    if lses.device != outs.device:
        raise ValueError(f"lses: expected a tensor on {outs.device}, got {lses.device}")
