"""Registers torch.compile, Liger and QuACK as peers, for comparison (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooflab.kernels._peers import LIGER_LIMITS, peer, theirs
from rooflab.kernels.rmsnorm.naive import norm

_liger_rms_norm = theirs("liger_kernel.ops.rms_norm", "rms_norm_forward")
_quack_rms_norm = theirs("quack.rmsnorm", "rmsnorm_fwd")


@peer()
def compiled(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    """Computes the op's formula, compiled by torch.compile."""
    return norm(x, weight, eps, weight_offset, round_first).to(x.dtype)


@peer(limits=LIGER_LIMITS, contiguous=("x",))
def liger(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool) -> Any:
    """Calls Liger's kernel.  Casting mode `llama` rounds before the multiplication by the weight; `gemma` does not."""
    return _liger_rms_norm(x, weight, eps, weight_offset, "llama" if round_first else "gemma", None)[0]


@peer(contiguous=("x",))
def quack(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float) -> Any:
    """Calls QuACK without bias and residual, in the dtype of x."""
    return _quack_rms_norm(x, weight, None, None, None, None, eps, False, weight_offset)[0]
