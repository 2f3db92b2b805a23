"""The kernel `native`, in C++ for the CPU, reads the pages in place, for decode rows and chunks of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale
from rooflab.kernels._native import DTYPE_CODES, built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic
from rooflab.reference.pages import check_pages
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the sizes, strides, window and number of threads for calls with this layout."""
    q, k_cache, block_table = of.q, of.k_cache, of.block_table
    k_page, k_token, k_head, _ = k_cache.stride()
    v_page, v_token, v_head, _ = of.v_cache.stride()
    return sizes(
        len(of.seq_lens), q.shape[1], k_cache.shape[2], q.shape[2], torch.get_num_threads(), *q.stride()[:2],
        *of.out.stride()[:2], k_token, k_head, v_token, v_head, k_page, v_page, k_cache.shape[1], block_table.stride(0),
        True, of.window or 0, len(q), block_table.shape[1], k_cache.shape[0],
    )  # fmt: skip


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=traffic,
    bind=shape,
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 10 and calls("native").names.keys() <= {"empty", "empty_like"}; '
            '"index_select" in calls("library").names'
        )
    },
)
def native(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    softmax_scale: float | None,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    bound: Any,
) -> None:
    """Computes decode rows and chunks of prompts in one call.  The call also checks lengths, bounds and pages."""
    bounds_ptr = None if cu_seqlens_q is None else cu_seqlens_q.data_ptr()
    data_ptrs = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), bounds_ptr)
    table_pointers = seq_lens.data_ptr(), block_table.data_ptr()
    if built(SOURCE, "ippppppppf")(
        DTYPE_CODES[q.dtype], *data_ptrs, *table_pointers, bound, get_scale(q, softmax_scale)
    ):
        # `check_pages` says what is wrong.
        check_pages(block_table, seq_lens, k_cache.shape[0], k_cache.shape[1], len(q), cu_seqlens_q, window)
