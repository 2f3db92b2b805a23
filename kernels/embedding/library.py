"""torch's embedding."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.embedding._operands import check_operands, traffic
from rooflab.kernels.registry import register


@register(op="embedding", name="library", role="library", backend="torch", traffic=traffic)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight[token_ids] with `torch.nn.functional.embedding`, or `torch.index_select` with an `out`.

    token_ids: (T,) int64; weight: (V, H); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes; an id outside
    the table raises torch's `IndexError` on the CPU and trips its device assertion on CUDA.
    """
    T, _, H = check_operands(token_ids, weight)
    if out is None:
        return torch.nn.functional.embedding(token_ids, weight)
    # Only index_select takes an `out`; on axis 0 it is the same as embedding.
    return torch.index_select(weight, 0, token_ids, out=output(out, (T, H), weight))
