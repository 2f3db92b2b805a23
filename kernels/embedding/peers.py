"""Implements the comparison kernel of embedding that torch.compile makes (`kernels/_peers.py`)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import embedding

from rooflab.kernels._peers import peer


@peer()
def compiled(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Computes the op's formula.  torch.compile compiles this function."""
    return embedding(token_ids, weight)
