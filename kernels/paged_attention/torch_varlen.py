"""Calls `torch.nn.attention.varlen.varlen_attn` with a block table, for comparison.  This needs torch 2.12 or newer.

torch's default is FlashAttention-2, with pages of a multiple of 256 tokens.  It may split the keys in a decode step
with grouped heads and no window.  In all other calls, split keys leave rows after the first sequence unwritten
(pytorch/pytorch#194167; Dao-AILab/flash-attention#2550).  These calls set `num_splits` to 1, so with few sequences most
SMs are idle.

The caller may activate FlashAttention-3 (arXiv 2407.08608) by
`torch.nn.attention.activate_flash_attention_impl("FA3")`.  It takes pages of any size, and always chooses the splits.

The measured time includes small launches that make offsets.  An engine would make the offsets once per step for all
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._attention import AttentionResult, get_scale, unseen
from rooflab.kernels.flash_attention.flash_attention_3 import window_sizes
from rooflab.kernels.flash_attention_varlen.torch_varlen import CAUSAL_WINDOW, call, why_lacking
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import check_all_pages
from rooflab.kernels.paged_attention._args import traffic as in_pages
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

PAGE_SIZE_MULTIPLE = 256
"""A page of FlashAttention-2 has a multiple of this number of tokens."""
FA3_NAME = "FA3"
"""torch's name for FlashAttention-3, which takes pages of any size."""
NEEDED_ARGUMENTS = ("window_size", "scale", "block_table", "seqused_k", "num_splits")


def _active() -> str | None:
    """Returns the name of the implementation that replaces torch's FlashAttention-2 in this process, or None."""
    # Imported here, because it imports torch._dynamo, which would cost every command 1.4 s.
    from torch.nn.attention import current_flash_attention_impl

    return current_flash_attention_impl()


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of the visible keys and values once, and of the log-sum-exp, which torch always writes."""
    return in_pages(inputs.but(return_lse=True))


def why_not_taken(inputs: Arguments) -> str | None:
    """Returns why torch's `varlen_attn` cannot take these inputs, or None."""
    block_size = inputs.k_cache.shape[1]
    refusal_text = why_lacking(*NEEDED_ARGUMENTS)
    if refusal_text or _active() == FA3_NAME:
        return refusal_text
    if _active() is not None:
        return f"kernel: expected FlashAttention-2 or {FA3_NAME}, got {_active()} activated"
    if block_size % PAGE_SIZE_MULTIPLE:
        page_text = f"pages of a multiple of {PAGE_SIZE_MULTIPLE} tokens for FlashAttention-2"
        return f"k_cache: expected {page_text}, got {block_size}; {FA3_NAME}, which is not activated, takes any"
    return None


@kernel(
    role="peer",
    backend="torch",
    min_sm=80,
    devices=("cuda",),
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(0, 257, 8)},
    unsupported=why_not_taken,
    traffic=traffic,
)
def torch_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls `varlen_attn`, which allocates the result.  Does not read the lengths, but passes the largest possible
    lengths."""
    # Asked at each call, because the activated kernel may have changed.
    if refusal_text := why_not_taken(Arguments(k_cache=k_cache)):
        raise ValueError(refusal_text)
    check_all_pages(q, k_cache, block_table, seq_lens, cu_seqlens_q)
    max_slots = block_table.shape[1] * k_cache.shape[1]
    if len(q) == 0 or max_slots == 0:
        return unseen(q, return_lse)
    query_offsets, max_query_len = cu_seqlens_q, len(q)
    if query_offsets is None:
        query_offsets, max_query_len = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device), 1
    takes_any_page = _active() == FA3_NAME
    is_unmasked = cu_seqlens_q is None and window is None
    may_split_keys = takes_any_page or (is_unmasked and q.shape[1] > k_cache.shape[2])
    # FlashAttention-3 refuses key offsets together with a table; FlashAttention-2 needs them, but uses `seqused_k`.
    key_offsets = None if takes_any_page else torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return call(
        q,
        k_cache,
        v_cache,
        query_offsets,
        key_offsets,
        max_query_len,
        max_slots,
        return_lse=return_lse,
        scale=get_scale(q, softmax_scale),
        window_size=CAUSAL_WINDOW if window is None and not is_unmasked else window_sizes(window),
        seqused_k=seq_lens,
        block_table=block_table,
        num_splits=None if may_split_keys else 1,
    )
