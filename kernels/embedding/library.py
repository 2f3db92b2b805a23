"""torch's own embedding."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.embedding._operands import check_operands, traffic
from rooflab.kernels.registry import register


@register(op="embedding", name="library", role="library", backend="torch", traffic=traffic)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight[token_ids] with `torch.nn.functional.embedding`, or `torch.index_select` where there is an `out`.

    token_ids: (T,) int64; weight: (V, H); returns (T, H). Raises `ValueError` on shapes or dtypes that do not fit; an
    id outside the table is torch's `IndexError` on the CPU and its device assertion on CUDA.
    """
    T, _, H = check_operands(token_ids, weight)
    if out is None:
        return torch.nn.functional.embedding(token_ids, weight)
    # embedding is index_select on one axis; only the latter takes an `out`.
    return torch.index_select(weight, 0, token_ids, out=output(out, (T, H), weight))
