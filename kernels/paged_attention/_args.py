"""Counts the bytes that kernels of paged_attention move, and makes checks that some of these kernels need."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._checks import checks_bounds
from rooflab.reference import pages
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of q, the output and the table entries once.  Visible keys and values count once per sequence:
    L2 or a CPU's cache keeps them for all tiles of the sequence.  A shared page counts for each of its sequences."""
    q, k_cache = inputs.q, inputs.k_cache
    T, H, D = q.shape
    lengths, query_bounds, window = inputs.seq_lens.long(), inputs.cu_seqlens_q, inputs.window
    query_counts = torch.ones_like(lengths) if query_bounds is None else query_bounds.long().diff()
    # The first key that a sequence's queries see, and one past their last, (B,) each.
    first_keys = torch.zeros_like(lengths) if window is None else (lengths - query_counts + 1 - window).clamp(min=0)
    visible_end = torch.where(query_counts > 0, lengths, 0)
    _, table_entries = used_slots(inputs.block_table, visible_end, k_cache.shape[0], k_cache.shape[1], first_keys)
    keys = int((visible_end - first_keys).clamp(min=0).sum())
    read_bytes = 2 * keys * k_cache.shape[2] * D * k_cache.element_size() + 4 * table_entries
    read_bytes += nbytes(q, inputs.seq_lens, inputs.cu_seqlens_q, inputs.sinks, inputs.k_scale, inputs.v_scale)
    return Traffic(read_bytes, nbytes(q) + (4 * T * H if inputs.return_lse else 0))


def pages_from(least: int) -> dict[str, str]:
    """Returns a kernel's condition on the page size: a power of two, and at least `least` tokens.  The dict maps the
    condition in Python to its meaning in words."""
    page_size_text = f"pages of a power of two of at least {least} tokens"
    return {f"block_size >= {least} and block_size & (block_size - 1) == 0": page_size_text}


def check_all_pages(
    q: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None = None
) -> None:
    """Checks all page numbers, for kernels that also read pages before a window.  The op checks only visible pages."""
    if checks_bounds(block_table):
        pages.check_pages(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], len(q), cu_seqlens_q)
