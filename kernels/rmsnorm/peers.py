"""torch.compile, Liger and QuACK (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._peers import LIGER, compiled, peer, theirs
from rooflab.kernels.rmsnorm._traffic import traffic
from rooflab.kernels.rmsnorm.naive import norm

_liger = theirs("liger_kernel.ops.rms_norm", "rms_norm_forward")
_quack = theirs("quack.rmsnorm", "rmsnorm_fwd")


def formula(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, round_first: bool) -> torch.Tensor:
    """The op as torch.compile sees it."""
    return norm(x, weight, eps, weight_offset, round_first).to(x.dtype)


def liger(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, round_first: bool) -> Any:
    """Its casting mode `llama` rounds first, `gemma` does not."""
    return _liger(x, weight, eps, weight_offset, "llama" if round_first else "gemma", None)[0]


def quack(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> Any:
    """Without bias and residual, in the dtype of x."""
    return _quack(x, weight, None, None, None, None, eps, False, weight_offset)[0]


peer("rmsnorm", "compiled", compiled(formula), traffic, lacks=("quantize",))
peer("rmsnorm", "liger", liger, traffic, lacks=("quantize",), limits=LIGER, contiguous=("x",))
peer(
    "rmsnorm", "quack", quack, traffic, lacks=("quantize", "round_first"), contiguous=("x",)
)  # fmt: skip
