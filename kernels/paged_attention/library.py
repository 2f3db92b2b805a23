"""The kernel `library` gathers the pages, then calls torch's scaled_dot_product_attention, which has no block table.

torch has two functions with a block table, for 16 bits on CUDA: the kernels `torch_varlen` (from 2.12 on) and `flex`.

Chunks of queries are computed one sequence after another.  The host reads the lengths first, so it waits for the GPU.

A decode step passes the query heads of a group as queries `[B, H_kv, group, D]`, so keys need no copies.  In bf16 on a
CPU, this has up to 15 times the speed of `enable_gqa`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rooflab.kernels._attention import never_zero
from rooflab.kernels._device import kind_of
from rooflab.kernels.flash_attention.library import call
from rooflab.kernels.launcher import kernel

_KeyValueCaches = tuple[Tensor, Tensor]
"""The cache of keys and the cache of values."""
ONE_CALL_ELEMENTS = 48 * 1024
"""The most key elements of the longest sequence for which, on a CPU, one call for all sequences is faster than one call
per sequence.  A call for one sequence finds the gathered keys and values in cache."""

WORKSPACE_BYTES = 2**30
"""Bytes of keys and values gathered at a time on a GPU: each row's table is as wide as the longest sequence's table."""


def _chunk(q: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Computes attention for the queries of one sequence, (T, H, D).  `keys` and `values` hold its cache entries, (1,
    S, H_kv, D)."""
    T, S = len(q), keys.shape[1]
    if window is None or S == 0:
        return call(q[None], keys, values, True, scale)[0]
    last_key = torch.arange(T, device=q.device)[:, None] + S - T
    key = torch.arange(S, device=q.device)
    key_mask = (key <= last_key) & (key > last_key - window)
    # In fp32 no fused backend takes grouped heads; for the other dtypes expanded heads cost nothing more.
    keys, values = (x.transpose(1, 2).repeat_interleave(q.shape[1] // x.shape[2], dim=1) for x in (keys, values))
    result = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=key_mask, scale=scale)
    return result[0].transpose(0, 1).masked_fill(~key_mask.any(1)[:, None, None], 0)


def _first(length: int, queries: int, window: int | None) -> int:
    """Returns the index of the first key that a sequence's queries see.  The queries are its last `queries` tokens."""
    return 0 if window is None else max(0, length - queries + 1 - window)


def _gather(cache: Tensor, block_table: Tensor, first: int, length: int) -> Tensor:
    """Gathers the tokens `first` to `length` of each sequence from the cache pages: (B, H_kv, length - first, D). On a
    CPU, index_select has up to 3 times the speed of indexing."""
    block_size = cache.shape[1]
    first_page, end_page = first // block_size, -(-length // block_size)
    cache_slots = cache.index_select(0, block_table[:, first_page:end_page].reshape(-1))
    cache_slots = cache_slots.view(len(block_table), (end_page - first_page) * block_size, *cache.shape[2:])
    return cache_slots[:, first - first_page * block_size : length - first_page * block_size].transpose(1, 2)


def _padded(
    queries: Tensor,
    caches: _KeyValueCaches,
    block_table: Tensor,
    lengths: list[int],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes attention for all sequences in one call, (B, H_kv, group, D).  A mask hides the tokens past the end of
    shorter sequences."""
    max_length = max(lengths)
    if min(lengths) == max_length:
        first_key = _first(max_length, 1, window)
        keys, values = (_gather(cache, block_table, first_key, max_length) for cache in caches)
        return F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    page_ids = block_table.clamp(0, len(caches[0]) - 1)
    keys, values = (_gather(cache, page_ids, 0, max_length) for cache in caches)
    for b, length in enumerate(lengths):
        # A mask does not stop a NaN that the query does not see: NaN + -inf and NaN * 0 are NaN.
        for key_or_value in (keys[b], values[b]):
            key_or_value[:, length:] = 0
            key_or_value[:, : _first(length, 1, window)] = 0
    key_ids, row_ends = torch.arange(max_length), torch.tensor(lengths)[:, None]
    is_seen = key_ids < row_ends if window is None else (key_ids < row_ends) & (key_ids >= row_ends - window)
    attention_out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen[:, None, None], scale=scale)
    for b, length in enumerate(lengths):
        if length == 0:
            attention_out[b] = 0
    return attention_out


def _whole_table(
    queries: Tensor,
    caches: _KeyValueCaches,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes attention over all pages of the block table, (B, H_kv, group, D).  A mask hides the slots without
    visible keys."""
    num_slots = block_table.shape[1] * caches[0].shape[1]
    table = block_table.clamp(0, len(caches[0]) - 1)
    not_seen = torch.arange(num_slots, device=queries.device) >= seq_lens[:, None]  # (B, slots)
    if window is not None:
        not_seen |= torch.arange(num_slots, device=queries.device) < seq_lens[:, None] - window
    keys, values = (_gather(cache, table, 0, num_slots).masked_fill_(not_seen[:, None, :, None], 0) for cache in caches)
    is_seen = ~not_seen[:, None, None]
    attention_out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen, scale=scale)
    return attention_out.masked_fill_((seq_lens == 0)[:, None, None, None], 0)


@kernel(backend="torch")
def library(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None,
) -> None:  # fmt: skip
    """Computes attention over gathered keys.  On a CPU, reads the lengths and gathers only the needed pages.  On a GPU,
    this read would wait for the device, so a decode step gathers all pages of the table and masks unused tokens."""
    caches, scale = (k_cache, v_cache), never_zero(softmax_scale)
    if cu_seqlens_q is not None:
        offsets = cu_seqlens_q.tolist()
        for b, (query_start, end, length) in enumerate(zip(offsets[:-1], offsets[1:], seq_lens.tolist(), strict=True)):
            if query_start == end:  # then the table may hold anything, as it may before a window
                continue
            first_key, pages = _first(length, end - query_start, window), block_table[b : b + 1]
            keys, values = (_gather(cache, pages, first_key, length).transpose(1, 2) for cache in caches)
            out[query_start:end] = _chunk(q[query_start:end], keys, values, scale, window)
        return
    B, H, D = q.shape
    H_kv = k_cache.shape[2]
    queries = q.reshape(B, H_kv, H // H_kv, D)
    if kind_of(q) != "cpu":
        row_bytes = 2 * block_table.shape[1] * k_cache[0].numel() * k_cache.element_size()
        rows_per_call = max(1, WORKSPACE_BYTES // max(row_bytes, 1))
        for rows in (slice(query_start, query_start + rows_per_call) for query_start in range(0, B, rows_per_call)):
            chunk_out = _whole_table(queries[rows], caches, block_table[rows], seq_lens[rows], scale, window)
            out[rows] = chunk_out.view(-1, H, D)
        return
    lengths = seq_lens.tolist()
    max_length = max(lengths, default=0)
    if max_length == 0:
        out.zero_()
        return
    if max_length * H_kv * D <= ONE_CALL_ELEMENTS:
        attention_out = _padded(queries, caches, block_table, lengths, scale, window)
        out.copy_(attention_out.view(B, H, D))
        return
    for b, length in enumerate(lengths):
        if length == 0:
            out[b] = 0
            continue
        first_key, pages = _first(length, 1, window), block_table[b : b + 1]
        keys, values = (_gather(cache, pages, first_key, length) for cache in caches)
        attention_out = F.scaled_dot_product_attention(queries[b : b + 1], keys, values, scale=scale)
        out[b] = attention_out.view(H, D)
