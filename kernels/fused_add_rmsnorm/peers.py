"""Implements comparison kernels of fused_add_rmsnorm: torch.compile, Liger and QuACK (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels._peers import LIGER_LIMITS, peer, theirs
from rooflab.kernels.rmsnorm.naive import norm

_liger_forward = theirs("liger_kernel.ops.fused_add_rms_norm", "fused_add_rms_norm_forward")
_quack_forward = theirs("quack.rmsnorm", "rmsnorm_fwd")


@peer()
def compiled(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Computes the op's formula step by step.  torch.compile fuses the steps."""
    new_residual = x + residual
    return norm(new_residual, weight, eps, weight_offset, round_first).to(x.dtype), new_residual


@peer(limits=LIGER_LIMITS, contiguous=("x", "residual"))
def liger(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool) -> Any:
    """Calls Liger's RMSNorm.  Its mode `llama` rounds before it multiplies by the weight; the mode `gemma` does not."""
    return _liger_forward(x, residual, weight, eps, weight_offset, "llama" if round_first else "gemma")[:2]


@peer(contiguous=("x", "residual"))
def quack(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, weight_offset: float) -> Any:
    """Calls QuACK's RMSNorm.  QuACK rounds the sum that it returns, but computes the norm from the fp32 sum."""
    return _quack_forward(x, weight, None, residual, None, None, eps, False, weight_offset)[:2]
