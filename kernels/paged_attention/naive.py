"""The kernel `naive` gathers the keys and values of each sequence, then runs flash_attention's naive kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels.flash_attention.naive import attend
from rooflab.kernels.launcher import kernel


def _gathered(cache: Tensor, table: Tensor, first: int, length: int) -> Tensor:
    """Gathers the cached tokens of one sequence, from token `first` on: (1, length - first, H_kv, D)."""
    key_positions = torch.arange(first, length, device=cache.device)
    return cache[table.long()[key_positions // cache.shape[1]], key_positions % cache.shape[1]][None]


@kernel(backend="torch")
def naive(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    softmax_scale: float | None,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    return_lse: bool,
) -> None:
    """Computes one sequence's attention after another.  The host reads the lengths, and so waits for the device."""
    scale = get_scale(q, softmax_scale)
    query_bounds = list(range(len(seq_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows, query_count = slice(query_bounds[b], query_bounds[b + 1]), query_bounds[b + 1] - query_bounds[b]
        if not query_count:  # then the table may hold anything, as it may before a window
            continue
        first_key = 0 if window is None else max(0, length - query_count + 1 - window)
        keys, values = (_gathered(cache, block_table[b], first_key, length) for cache in (k_cache, v_cache))
        cache_scales = [None if cache_scale is None else cache_scale[None] for cache_scale in (k_scale, v_scale)]
        row_results = out[None, rows], None if lse is None else lse[None, rows]
        attend(q[None, rows], keys, values, *row_results, True, scale, window, softcap, sinks, None, *cache_scales)
