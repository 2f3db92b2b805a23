"""Provides helpers for ops with a paged cache: sequence lengths, block tables, and the number of cache slots read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rooflab.reference.rules import check_offsets
from rooflab.reference.spec import Case, Inputs

SPARE_BLOCKS = 3
"""The number of pages that belong to no sequence; these pages hold NaN."""


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """Returns the cumulative offsets (B + 1,) int32 of B sequences with `counts` tokens."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def turned(bounds: torch.Tensor) -> torch.Tensor:
    """Returns the cumulative offsets (B + 1,) of the sequences in `bounds` in reversed ("turned") order."""
    return torch.nn.functional.pad(bounds.diff().flip(0).cumsum(0), (1, 0)).to(bounds.dtype)


def drawn_lengths(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Returns the lengths of the sequences, (B,) int32. By default each length is `context`.

    With `ragged` the lengths are random. The first length is then `context`, and for B >= 3 one length is 0. With
    `lognormal` the lengths follow a log-normal distribution with the mean `context`."""
    B, kv_len = int(case["B"]), int(case["context"])
    if case.get("lognormal"):
        return _lognormal(B, kv_len, generator)
    if not case["ragged"]:
        return torch.full((B,), kv_len, dtype=torch.int32)
    lengths = torch.randint(0, kv_len + 1, (B,), generator=generator, dtype=torch.int32)
    lengths[:1] = kv_len
    if B >= 3:
        lengths[B // 2] = 0
    return lengths


def _lognormal(B: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Draws `B` random sequence lengths from a log-normal distribution, (B,) int32. Their mean is about `context`."""
    raw_lens = torch.randn(B, generator=generator, dtype=torch.float64).exp()  # fp32 is exact only up to 2**24 tokens
    end_offsets = (raw_lens.cumsum(0) * (B * context / raw_lens.sum())).round()
    return torch.diff(end_offsets, prepend=torch.zeros(1, dtype=torch.float64)).to(torch.int32)


def dealt_pages(
    lengths: torch.Tensor, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the block table, (B, max_blocks) int32, and a mask of slots without a token, (num_blocks, block_size)
    bool.

    The pages are in shuffled order. Each row of the table ends with one or more padding entries of -1."""
    pages = -(-lengths // block_size)
    num_blocks = int(pages.sum()) + SPARE_BLOCKS
    page_order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    page_table = torch.full((len(lengths), max(pages.tolist(), default=0) + 1), -1, dtype=torch.int32)
    unused_slot_mask = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for b, (page_count, length) in enumerate(zip(pages.tolist(), lengths.tolist(), strict=True)):
        sequence_pages, page_order = page_order[:page_count], page_order[page_count:]
        page_table[b, :page_count] = sequence_pages
        unused_slot_mask[sequence_pages.long()] = (torch.arange(page_count * block_size) >= length).view(
            page_count, block_size
        )
    return page_table, unused_slot_mask


def uneven_tables(inputs: Inputs, caches: tuple[str, ...]) -> Iterator[tuple[str, Inputs]]:
    """Yields three adversarial inputs of an op with pages. In the first, the sequences are shorter than in the sets
    before, and the shapes are the same: a kernel may keep partial results of longer sequences. In the second, the block
    table has more columns, and invalid page numbers as padding. In the third, NaN fills the first sequence's pages;
    other sequences must not read them."""
    table, lengths, num_blocks = inputs["block_table"], inputs["seq_lens"], len(inputs[caches[0]])
    short_lengths = lengths.new_tensor([1, inputs[caches[0]].shape[1] + 1, 0]).repeat(-(-len(lengths) // 3))
    yield "shorter sequences", {**inputs, "seq_lens": torch.minimum(lengths, short_lengths[: len(lengths)])}
    bad_ids = torch.tensor([-(2**31), num_blocks, 2**31 - 1, -num_blocks - 1], dtype=torch.int32, device=table.device)
    wide_table = torch.nn.functional.pad(table, (0, 3), value=-1)
    padding_entries = bad_ids[torch.arange(wide_table.numel(), device=table.device) % 4].view(wide_table.shape)
    yield (
        "uneven rows: padding of the table that is no page",
        {**inputs, "block_table": torch.where(wide_table < 0, padding_entries, wide_table)},
    )
    if len(table) > 1:
        pages = table[0][table[0] >= 0].long()
        nan_caches = {cache_name: inputs[cache_name].clone() for cache_name in caches}
        for cache in nan_caches.values():
            cache[pages] = math.nan
        yield "values: NaN in the pages of one sequence", {**inputs, **nan_caches}


def check_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    queries: int,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Raises `ValueError` on lengths beyond the block table, decreasing query offsets, and wrong page numbers.

    Pages that no query sees are not checked."""
    # NumPy computes only what is needed: torch takes ten times as long for few numbers.
    table, lengths = block_table.cpu().numpy(), seq_lens.cpu().numpy()[:, None]
    capacity, page_counts, query_counts = table.shape[1] * block_size, -(-lengths // block_size), np.ones_like(lengths)
    if len(lengths) and (lengths.min() < 0 or lengths.max() > capacity):
        raise ValueError(f"seq_lens: expected 0 to {capacity}, which block_table has room for, got {seq_lens.tolist()}")
    if cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", cu_seqlens_q, queries)
        query_counts = np.diff(cu_seqlens_q.cpu().numpy())[:, None]
        page_counts = np.where(query_counts > 0, page_counts, 0)
    page_indices = np.arange(table.shape[1])
    bad_mask = (table.view(np.uint32) >= num_blocks) & (page_indices < page_counts)
    if window is not None:
        bad_mask &= page_indices >= (lengths - query_counts + 1 - min(window, capacity)) // block_size
    if bad_mask.any():
        raise ValueError(f"block_table: expected pages below {num_blocks} up to each length, got {table[bad_mask][0]}")


def gathered(cache: torch.Tensor, pages: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
    """Returns the tokens `first` to `length` - 1 of a sequence: (length - first, ...). Reads only these tokens' slots
    of the cache (num_blocks, block_size, ...)."""
    token_positions = torch.arange(first, length, device=cache.device)
    block_size = cache.shape[1]
    return cache[pages.to(cache.device).long()[token_positions // block_size], token_positions % block_size]


def used_slots(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    first: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Returns the number of distinct cache slots that sequences see, and the number of block table entries used.

    first: (B,), the first token that each sequence sees; None means 0."""
    lengths = seq_lens.cpu().long()[:, None]
    first_tokens = torch.zeros_like(lengths) if first is None else first.long()[:, None]
    page_offsets = torch.arange(block_table.shape[1]) * block_size
    page_ends = (lengths - page_offsets).clamp(0, block_size)  # (B, max_blocks): one past the last token in each page
    page_starts = (first_tokens - page_offsets).clamp(0, block_size)
    used_entries = page_ends > page_starts
    page_ids = block_table.cpu().long()[used_entries]
    end_slots = torch.zeros(num_blocks, dtype=torch.int64).scatter_reduce_(0, page_ids, page_ends[used_entries], "amax")
    first_slots = torch.full((num_blocks,), block_size).scatter_reduce_(0, page_ids, page_starts[used_entries], "amin")
    return int((end_slots - first_slots).clamp(min=0).sum()), int(used_entries.sum())


def drawn_pages(T: int, block_size: int, spare: int, skipped: str, **values: Any) -> Case:
    """Makes a case that writes T tokens to a paged cache. The cache has `spare` pages more than T tokens need."""
    skipped_tokens = {"none": 0, "some": (T + 2) // 3, "all": T}[skipped]
    return Case(T=T, num_blocks=-(-T // block_size) + spare, block_size=block_size, skipped=skipped_tokens, **values)
