"""torch.compile, Liger and QuACK (`kernels/_peers.py`)."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._peers import LIGER, compiled, peer, theirs
from rooflab.kernels.softmax._traffic import traffic

_liger = theirs("liger_kernel.ops.softmax", "_softmax_forward")
_quack = theirs("quack.softmax", "softmax_fwd")


def formula(x: torch.Tensor) -> torch.Tensor:
    """The op as torch.compile sees it."""
    return torch.softmax(x, -1)


def liger(x: torch.Tensor) -> Any:
    """Behind its autograd function."""
    return _liger(x)[0]


def quack(x: torch.Tensor) -> Any:
    """Behind its autograd function."""
    return _quack(x)


peer("softmax", "compiled", compiled(formula), traffic)
peer("softmax", "liger", liger, traffic, limits=LIGER, contiguous=("x",))
peer("softmax", "quack", quack, traffic, contiguous=("x",))
