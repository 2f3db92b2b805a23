"""torch.compile (`kernels/_peers.py`)."""

from __future__ import annotations

import torch

from rooflab.kernels._peers import compiled, peer
from rooflab.kernels.embedding._traffic import traffic


def formula(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The op as torch.compile sees it."""
    return torch.nn.functional.embedding(token_ids, weight)


peer("embedding", "compiled", compiled(formula), traffic)
