"""FlashAttention-3 over a paged cache (Shah et al., arXiv 2407.08608): `flash_attn_with_kvcache`, if it is installed.

Decode only: chunks of prompts need the longest one's length on the host.  `fa3-fwd` has no pages; the authors' package
and `tokenspeed-fa3` have.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._attention import Returned
from rooflab.kernels.flash_attention.flash_attention_3 import AUTHORS, window_sizes
from rooflab.kernels.paged_attention._args import check_args
from rooflab.kernels.paged_attention.chunked import traffic
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options


def why_not_taken(q: torch.Tensor, k_cache: torch.Tensor) -> str | None:
    """Why the package cannot take these inputs, or None."""
    if q.dtype not in (torch.float16, torch.bfloat16) or k_cache.dtype != q.dtype:
        return f"takes fp16 and bf16, got {q.dtype} and a cache of {k_cache.dtype}"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"needs a head_dim of at most 256 in multiples of 8, got {q.shape[-1]}"
    return None


def unsupported(inputs: Arguments) -> str | None:
    """`why_not_taken`, of all arguments."""
    return why_not_taken(inputs.q, inputs.k_cache)


@register(
    op="paged_attention", name="flash_attention_3", role="peer", backend="cuda", min_sm=90, devices=("cuda",),
    requires=(AUTHORS,), unsupported=unsupported, traffic=traffic,
)  # fmt: skip
def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Returned:
    """`flash_attn_with_kvcache` with the package's own number of splits.  q: (B, H, D), one query per sequence.

    k_cache, v_cache: (num_blocks, block_size, H_kv, D); block_table: (B, blocks); seq_lens: (B,); returns (B, H, D).
    The package allocates the result, so there is no `out`.  Raises `ValueError` on wrong shapes, dtypes or options.
    """
    check_args(q, k_cache, v_cache, block_table, seq_lens)
    check_options(q, True, window, softcap, None)
    if reason := why_not_taken(q, k_cache):
        raise ValueError(reason)
    if not q.numel() or not k_cache.numel() or not block_table.numel():
        lse = torch.full(q.shape[:2], -math.inf, device=q.device)
        return (torch.zeros_like(q), lse) if return_lse else torch.zeros_like(q)
    library: Any = import_module(AUTHORS)
    result = library.flash_attn_with_kvcache(
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
