"""The kernel `naive` computes the softmax by its formula, with one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(x: Tensor, out: Tensor) -> None:
    """Computes `exp(x - max) / sum`, step by step."""
    x32 = x.float()
    weights = torch.exp(x32 - x32.amax(dim=-1, keepdim=True))
    torch.div(weights, weights.sum(dim=-1, keepdim=True), out=out)
