"""One sequence at a time: gather its keys and values, scores in memory, softmax, second product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels.launcher import kernel


def _gathered(cache: Tensor, table: Tensor, first: int, length: int, factor: Tensor | None, heads: int) -> Tensor:
    """A sequence's tokens from `first` on, (H, length - first, D) fp32, times their heads' scales."""
    token = torch.arange(first, length, device=cache.device)
    tokens = cache[table.long()[token // cache.shape[1]], token % cache.shape[1]].float()
    if factor is not None:
        tokens = tokens * factor[:, None]
    return tokens.repeat_interleave(heads // cache.shape[2], dim=1).transpose(0, 1)


@kernel(backend="torch")
def naive(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool,
) -> None:  # fmt: skip
    """Waits for the device to read the lengths."""
    scale = get_scale(q, softmax_scale)
    bounds = list(range(len(seq_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows, count = slice(bounds[b], bounds[b + 1]), bounds[b + 1] - bounds[b]
        if not count:  # then the table may hold anything, and so it may before the window
            continue
        first = 0 if window is None else max(0, length - count + 1 - window)
        keys, values = (
            _gathered(cache, block_table[b], first, length, factor, q.shape[1])
            for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
        )
        scores = q[rows].float().transpose(0, 1) @ keys.mT * scale  # (H, queries, length - first)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        last = torch.arange(count, device=q.device)[:, None] + length - count
        key = torch.arange(first, length, device=q.device)
        unseen = key > last if window is None else (key > last) | (key <= last - window)
        scores.masked_fill_(unseen, -math.inf)
        denominator = torch.logsumexp(scores, dim=-1)  # (H, queries)
        if sinks is not None:
            denominator = torch.logaddexp(denominator, sinks[:, None])
        # The denominator of a row that sees no key is -inf, and -inf - -inf would be NaN.
        weights = torch.exp(scores - denominator.masked_fill(denominator == -math.inf, 0.0)[..., None])
        out[rows] = (weights @ values).transpose(0, 1)
        if lse is not None:
            lse[rows] = denominator.mT
