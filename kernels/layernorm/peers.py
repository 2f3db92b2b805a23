"""Registers layernorm kernels of other projects for comparison: torch.compile and Liger (`kernels/_peers.py`).  QuACK
is not here, because it takes only fp32 weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm

from rooflab.kernels._peers import LIGER_LIMITS, peer, theirs

_liger_layer_norm = theirs("liger_kernel.ops.layer_norm", "layer_norm_forward")


@peer()
def compiled(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Computes the op's formula, compiled by torch.compile."""
    return layer_norm(x, weight.shape, weight, bias, eps)


@peer(limits=LIGER_LIMITS, contiguous=("x",), holds={"bias is not None": "one"})
def liger(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Any:
    """Calls Liger, which needs a bias."""
    return _liger_layer_norm(x, weight, bias, eps)[0]
