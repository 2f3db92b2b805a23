"""Registers torch.compile, Liger and QuACK as peers, for comparison (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._peers import LIGER_LIMITS, peer, theirs

_liger_softmax = theirs("liger_kernel.ops.softmax", "_softmax_forward")
_quack_softmax = theirs("quack.softmax", "softmax_fwd")


@peer()
def compiled(x: Tensor) -> Tensor:
    """Computes the op's formula, compiled by torch.compile."""
    return torch.softmax(x, -1)


@peer(limits=LIGER_LIMITS, contiguous=("x",))
def liger(x: Tensor) -> Any:
    """Calls Liger's softmax through its autograd function."""
    return _liger_softmax(x)[0]


@peer(contiguous=("x",))
def quack(x: Tensor) -> Any:
    """Calls QuACK's softmax through its autograd function."""
    return _quack_softmax(x)
