"""torch.compile and Liger (`kernels/_peers.py`).  QuACK takes weights in fp32 alone."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.kernels._peers import LIGER, compiled, peer, theirs
from rooflab.kernels.layernorm._traffic import traffic

_liger = theirs("liger_kernel.ops.layer_norm", "layer_norm_forward")


def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The op as torch.compile sees it."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def liger(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    """It has no form without a bias."""
    return _liger(x, weight, bias, eps)[0]


peer("layernorm", "compiled", compiled(formula), traffic)
peer("layernorm", "liger", liger, traffic, limits=LIGER, contiguous=("x",), holds={"bias is not None": "one"})
