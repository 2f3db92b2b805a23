"""Checks of the values in the tables of a paged cache, with `_checks.CHECK_VALUES`."""

from __future__ import annotations

import torch

from rooflab.kernels import _checks


def check_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    queries: int,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """With `CHECK_VALUES`: raises `ValueError` on lengths beyond the table, falling bounds, and wrong page numbers.

    Only pages that a query sees are checked.
    """
    if not _checks.CHECK_VALUES or block_table.is_meta:
        return
    room, lengths = block_table.shape[1] * block_size, seq_lens.long()
    if ((lengths < 0) | (lengths > room)).any():
        raise ValueError(f"seq_lens: expected 0 to {room}, which block_table has room for, got {lengths.tolist()}")
    counts = torch.ones_like(lengths)
    if cu_seqlens_q is not None:
        counts = cu_seqlens_q.long().diff()
        if cu_seqlens_q[0] != 0 or cu_seqlens_q[-1] != queries or (counts < 0).any():
            bounds = cu_seqlens_q.tolist()
            raise ValueError(f"cu_seqlens_q: expected bounds that rise from 0 to q's {queries}, got {bounds}")
    first = torch.zeros_like(lengths) if window is None else lengths - counts + 1 - window
    starts = torch.arange(block_table.shape[1], device=block_table.device) * block_size
    seen = (counts > 0)[:, None] & (starts < lengths[:, None]) & (starts + block_size > first[:, None])
    wrong = block_table[seen & ((block_table < 0) | (block_table >= num_blocks))]
    if len(wrong):
        raise ValueError(f"block_table: expected pages below {num_blocks} up to each length, got {int(wrong[0])}")
