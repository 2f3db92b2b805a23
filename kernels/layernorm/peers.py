"""Registers torch.compile and Liger as peers, for comparison (`kernels/_peers.py`).  QuACK takes only fp32 weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm

from rooflab.kernels._peers import LIGER, peer, theirs

_liger = theirs("liger_kernel.ops.layer_norm", "layer_norm_forward")


@peer()
def compiled(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Computes the op's formula, compiled by torch.compile."""
    return layer_norm(x, weight.shape, weight, bias, eps)


@peer(limits=LIGER, contiguous=("x",), holds={"bias is not None": "one"})
def liger(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Any:
    """Calls Liger, which needs a bias."""
    return _liger(x, weight, bias, eps)[0]
