"""Checks of the values in the tables of a paged cache, on a CPU, or with `_checks.CHECK_VALUES`."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import checks_bounds
from rooflab.reference import pages


def check_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int,
    block_size: int,
    queries: int,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
) -> None:
    """Raises `ValueError` as `reference.pages.check_pages` does, on a CPU or with `CHECK_VALUES`."""
    if checks_bounds(block_table):
        pages.check_pages(block_table, seq_lens, num_blocks, block_size, queries, cu_seqlens_q, window)
