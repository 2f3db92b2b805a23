"""For the CPU, in C++: reads the pages where they lie, for decoding rows and chunks of prompts alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rooflab.kernels._attention import get_scale
from rooflab.kernels._checks import output
from rooflab.kernels._native import DTYPES, Layouts, built, sizes
from rooflab.kernels.paged_attention._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.reference.pages import check_pages
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic

SOURCE = Path(__file__).with_suffix(".cpp")
_layouts = Layouts()


def traffic(inputs: Arguments) -> Traffic:
    """Each query once, and each sequence's keys and values once: they stay in cache for its queries."""
    q, cache, lengths = inputs.q, inputs.k_cache, inputs.seq_lens
    if inputs.window is not None and inputs.cu_seqlens_q is None:
        lengths = lengths.clamp(max=inputs.window)
    keys = 2 * int(lengths.sum()) * cache.shape[2] * cache.shape[3] * cache.element_size()
    return Traffic(nbytes(q, inputs.block_table, inputs.seq_lens) + keys, nbytes(q))


@register(op="paged_attention", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention through a block table.  q: (T, H, D); returns (T, H, D).

    Raises `ValueError` on wrong shapes or dtypes, and on lengths, bounds or pages that do not fit.
    """
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    shape = _layouts.of(_shape, (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out), window)
    bounds = None if cu_seqlens_q is None else cu_seqlens_q.data_ptr()
    pointers = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), bounds)
    more = seq_lens.data_ptr(), block_table.data_ptr()
    if built(SOURCE, "ippppppppf")(DTYPES[q.dtype], *pointers, *more, shape, get_scale(q, softmax_scale)):
        # It says what is wrong.
        check_pages(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], len(q), cu_seqlens_q, window)
    return out


def _shape(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    out: torch.Tensor,
    window: int | None,
) -> Any:
    check_args(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, window=window)
    check_options(q, True, window, None, None)
    output(out, tuple(q.shape), q)
    k_page, k_token, k_head, _ = k_cache.stride()
    v_page, v_token, v_head, _ = v_cache.stride()
    return sizes(
        len(seq_lens), q.shape[1], k_cache.shape[2], q.shape[2], torch.get_num_threads(), *q.stride()[:2],
        *out.stride()[:2], k_token, k_head, v_token, v_head, k_page, v_page, k_cache.shape[1], block_table.stride(0),
        True, window or 0, len(q), block_table.shape[1], k_cache.shape[0],
    )  # fmt: skip
