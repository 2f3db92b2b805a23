"""Calls FlashAttention-3 over a paged cache (Shah et al., arXiv 2407.08608) by `flash_attn_with_kvcache`, if installed.

This peer is for decode only: for chunks of prompts, the host would have to know the longest length.  `fa3-fwd` does not
support pages.  The authors' package and `tokenspeed-fa3` support pages.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from rooflab.kernels._attention import AttentionResult, unseen
from rooflab.kernels.flash_attention.flash_attention_3 import AUTHORS_PACKAGE, window_sizes
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import check_all_pages, traffic
from rooflab.kernels.takes import HALF_DTYPES


@kernel(
    role="peer",
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=(AUTHORS_PACKAGE,),
    dtypes={"q": HALF_DTYPES, "k_cache": HALF_DTYPES},
    limits={"D": range(0, 257, 8)},
    traffic=traffic,
)
def flash_attention_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls `flash_attn_with_kvcache`, which allocates the result and chooses the number of splits."""
    check_all_pages(q, k_cache, block_table, seq_lens)
    if not q.numel() or not k_cache.numel() or not block_table.numel():
        return unseen(q, return_lse)
    fa3_module: Any = import_module(AUTHORS_PACKAGE)
    result = fa3_module.flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        cache_seqlens=seq_lens,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=window_sizes(window),
        softcap=softcap or 0.0,
        return_softmax_lse=return_lse,
    )
    return (result[0][:, 0], result[1][:, :, 0]) if return_lse else result[:, 0]
