"""Helpers of ops over a paged cache: the lengths of sequences, their pages, and the number of slots that are read."""

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
    """Returns the bounds (B + 1,) int32 of sequences with these numbers of tokens."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def turned(bounds: torch.Tensor) -> torch.Tensor:
    """Returns the bounds (B + 1,) of the same sequences in reverse order."""
    return torch.nn.functional.pad(bounds.diff().flip(0).cumsum(0), (1, 0)).to(bounds.dtype)


def drawn_lengths(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Draws the lengths of the sequences, (B,) int32: `context` tokens each.

    With `ragged` the lengths vary: one sequence has `context` tokens, and if there are three or more, one is empty.
    With `lognormal` the lengths follow a log-normal law, and the sum of the lengths is about B * context.
    """
    B, context = int(case["B"]), int(case["context"])
    if case.get("lognormal"):
        return _lognormal(B, context, generator)
    if not case["ragged"]:
        return torch.full((B,), context, dtype=torch.int32)
    lengths = torch.randint(0, context + 1, (B,), generator=generator, dtype=torch.int32)
    lengths[:1] = context
    if B >= 3:
        lengths[B // 2] = 0
    return lengths


def _lognormal(B: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Draws lengths (B,) int32: exponentials of normal numbers, scaled to a mean of `context`."""
    drawn = torch.randn(B, generator=generator, dtype=torch.float64).exp()  # fp32 is exact only up to 2**24 tokens
    ends = (drawn.cumsum(0) * (B * context / drawn.sum())).round()
    return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.float64)).to(torch.int32)


def dealt_pages(
    lengths: torch.Tensor, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the block table, (B, max_blocks) int32, and the slots that hold no token, (num_blocks, block_size) bool.

    The pages are in shuffled order, and each row of the table ends with at least one entry of padding, -1.
    """
    pages = -(-lengths // block_size)
    num_blocks = int(pages.sum()) + SPARE_BLOCKS
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    table = torch.full((len(lengths), max(pages.tolist(), default=0) + 1), -1, dtype=torch.int32)
    unused = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for b, (count, length) in enumerate(zip(pages.tolist(), lengths.tolist(), strict=True)):
        mine, order = order[:count], order[count:]
        table[b, :count] = mine
        unused[mine.long()] = (torch.arange(count * block_size) >= length).view(count, block_size)
    return table, unused


def uneven_tables(inputs: Inputs, caches: tuple[str, ...]) -> Iterator[tuple[str, Inputs]]:
    """Adversarial inputs of an op over pages: a table that is too wide, with padding that is no page number; then NaN
    in the pages of the first sequence.  This NaN must not reach other sequences."""
    table, num_blocks = inputs["block_table"], len(inputs[caches[0]])
    nowhere = torch.tensor([-(2**31), num_blocks, 2**31 - 1, -num_blocks - 1], dtype=torch.int32, device=table.device)
    wide = torch.nn.functional.pad(table, (0, 3), value=-1)
    padding = nowhere[torch.arange(wide.numel(), device=table.device) % 4].view(wide.shape)
    yield (
        "uneven rows: padding of the table that is no page",
        {**inputs, "block_table": torch.where(wide < 0, padding, wide)},
    )
    if len(table) > 1:
        pages = table[0][table[0] >= 0].long()
        tainted = {name: inputs[name].clone() for name in caches}
        for cache in tainted.values():
            cache[pages] = math.nan
        yield "values: NaN in the pages of one sequence", {**inputs, **tainted}


def check_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    queries: int,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Raises `ValueError` on lengths beyond the table, falling bounds, and wrong page numbers.

    Only pages that a query sees are checked.
    """
    # NumPy computes only what is needed: torch takes ten times as long for few numbers.
    table, lengths = block_table.cpu().numpy(), seq_lens.cpu().numpy()[:, None]
    room, ends, counts = table.shape[1] * block_size, -(-lengths // block_size), np.ones_like(lengths)
    if len(lengths) and (lengths.min() < 0 or lengths.max() > room):
        raise ValueError(f"seq_lens: expected 0 to {room}, which block_table has room for, got {seq_lens.tolist()}")
    if cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", cu_seqlens_q, queries)
        counts = np.diff(cu_seqlens_q.cpu().numpy())[:, None]
        ends = np.where(counts > 0, ends, 0)
    places = np.arange(table.shape[1])
    wrong = (table.view(np.uint32) >= num_blocks) & (places < ends)
    if window is not None:
        wrong &= places >= (lengths - counts + 1 - min(window, room)) // block_size
    if wrong.any():
        raise ValueError(f"block_table: expected pages below {num_blocks} up to each length, got {table[wrong][0]}")


def gathered(cache: torch.Tensor, pages: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
    """Returns a sequence's tokens in order, from the token `first` on: (length - first, ...).  It reads only the slots
    of these tokens in the cache (num_blocks, block_size, ...)."""
    token = torch.arange(first, length, device=cache.device)
    block_size = cache.shape[1]
    return cache[pages.to(cache.device).long()[token // block_size], token % block_size]


def used_slots(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    first: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Counts the cache slots that any sequence sees, each slot once, and the table entries that are needed.

    first: (B,), the first token that each sequence sees; None means 0.
    """
    lengths = seq_lens.cpu().long()[:, None]
    starts = torch.zeros_like(lengths) if first is None else first.long()[:, None]
    page = torch.arange(block_table.shape[1]) * block_size
    filled = (lengths - page).clamp(0, block_size)  # (B, max_blocks): one past the last token in each page
    skipped = (starts - page).clamp(0, block_size)
    named = filled > skipped
    blocks = block_table.cpu().long()[named]
    most = torch.zeros(num_blocks, dtype=torch.int64).scatter_reduce_(0, blocks, filled[named], "amax")
    least = torch.full((num_blocks,), block_size).scatter_reduce_(0, blocks, skipped[named], "amin")
    return int((most - least).clamp(min=0).sum()), int(named.sum())


def drawn_pages(T: int, block_size: int, spare: int, skipped: str, **values: Any) -> Case:
    """Makes the case of an op that writes T tokens into a cache with `spare` blocks more than the tokens need."""
    missing = {"none": 0, "some": (T + 2) // 3, "all": T}[skipped]
    return Case(T=T, num_blocks=-(-T // block_size) + spare, block_size=block_size, skipped=missing, **values)
