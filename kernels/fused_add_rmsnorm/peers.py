"""torch.compile, Liger and QuACK (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._peers import LIGER, compiled, peer, theirs
from rooflab.kernels.fused_add_rmsnorm._traffic import traffic
from rooflab.kernels.rmsnorm.naive import norm

_liger = theirs("liger_kernel.ops.fused_add_rms_norm", "fused_add_rms_norm_forward")
_quack = theirs("quack.rmsnorm", "rmsnorm_fwd")


def formula(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, round_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op as torch.compile sees it."""
    new_residual = x + residual
    return norm(new_residual, weight, eps, weight_offset, round_first).to(x.dtype), new_residual


def liger(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, round_first: bool
) -> Any:
    """Its casting mode `llama` rounds first, `gemma` does not."""
    return _liger(x, residual, weight, eps, weight_offset, "llama" if round_first else "gemma")[:2]


def quack(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> Any:
    """It norms the sum in fp32, before it rounds the sum for the next layer."""
    return _quack(x, weight, None, residual, None, None, eps, False, weight_offset)[:2]


peer("fused_add_rmsnorm", "compiled", compiled(formula), traffic, lacks=("quantize",))
peer("fused_add_rmsnorm", "liger", liger, traffic, lacks=("quantize",), limits=LIGER, contiguous=("x", "residual"))
peer(
    "fused_add_rmsnorm", "quack", quack, traffic, lacks=("quantize", "round_first"),
    contiguous=("x", "residual"),
)  # fmt: skip
