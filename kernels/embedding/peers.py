"""Implements embedding by torch.compile, as a comparison kernel (`kernels/_peers.py`)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import embedding

from rooflab.kernels._peers import peer


@peer()
def compiled(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Computes the op's formula, `weight[token_ids]`.  torch.compile compiles this function."""
    return embedding(token_ids, weight)
