"""What launchers of paged_attention share: the bytes that they move, and what some of them check."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._checks import checks_bounds
from rooflab.kernels._tma import address_of
from rooflab.reference import pages
from rooflab.reference.pages import used_slots
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The keys and values that a sequence's queries see once, because L2, or a CPU's cache, keeps them for its tiles; a
    page that several sequences share once for each; q, the output, and the table entries once."""
    q, k_cache = inputs.q, inputs.k_cache
    T, H, D = q.shape
    lengths, bounds, window = inputs.seq_lens.long(), inputs.cu_seqlens_q, inputs.window
    counts = torch.ones_like(lengths) if bounds is None else bounds.long().diff()
    # The first key that a sequence's queries see, and one past their last, (B,) each.
    first = torch.zeros_like(lengths) if window is None else (lengths - counts + 1 - window).clamp(min=0)
    end = torch.where(counts > 0, lengths, 0)
    _, entries = used_slots(inputs.block_table, end, k_cache.shape[0], k_cache.shape[1], first)
    keys = int((end - first).clamp(min=0).sum())
    read = 2 * keys * k_cache.shape[2] * D * k_cache.element_size() + 4 * entries
    read += nbytes(q, inputs.seq_lens, inputs.cu_seqlens_q, inputs.sinks, inputs.k_scale, inputs.v_scale)
    return Traffic(read, nbytes(q) + (4 * T * H if inputs.return_lse else 0))


def why_unaligned(inputs: Arguments) -> str | None:
    """Why a key or a value begins at an address that is not a multiple of 16 bytes, or None."""
    for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
        steps = [stride for size, stride in zip(cache.shape[:-1], cache.stride(), strict=False) if size > 1]
        if any(place % 16 for place in (address_of(cache), *(step * cache.element_size() for step in steps))):
            wanted = f"keys and values at multiples of 16 bytes, got strides {cache.stride()}"
            return f"{name}: expected {wanted}; paged_attention/chunked takes any"
    return None


def check_all_pages(
    q: Tensor, k_cache: Tensor, block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor | None = None
) -> None:
    """For a kernel that also reads the pages before a window: they are checked as the op checks those that are seen."""
    if checks_bounds(block_table):
        pages.check_pages(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], len(q), cu_seqlens_q)
