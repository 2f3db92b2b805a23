"""Implements `library`: torch's FlashAttention-2 with offsets, or scaled_dot_product_attention for each sequence.

If FlashAttention-2 does not support the inputs, the kernel calls scaled_dot_product_attention.  For FlashAttention-2 it
calls torch's internal operator, because the signature of `torch.nn.attention.varlen` changed in each release from 2.10
to 2.12.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._attention import get_scale, never_zero
from rooflab.kernels._device import kind_of
from rooflab.kernels.flash_attention.library import call
from rooflab.kernels.flash_attention_varlen.naive import spans
from rooflab.kernels.launcher import kernel


def has_flash(q: Tensor) -> bool:
    """Returns whether FlashAttention-2 supports `q`: 16 bits, on CUDA, head_dim a multiple of 8 and at most 256."""
    return kind_of(q) == "cuda" and q.dtype != torch.float32 and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0


def longest_queries(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> int:
    """Returns the maximum number of queries per sequence for torch's FlashAttention-2.  It is at least 2 if a sequence
    may be empty, because with a maximum of 1 torch assumes that every sequence has one query."""
    return max_seqlen_q if len(q) == len(cu_seqlens_q) - 1 else max(max_seqlen_q, 2)


@kernel(
    backend="torch",
    holds={
        "window is None or device == 'cuda' and itemsize == 2 and D <= 256 and D % 8 == 0": (
            "None but on CUDA in 16 bits with D of at most 256 in multiples of 8, where torch has a window"
        )
    },
)
def library(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
) -> Tensor:
    """Computes attention by torch, which allocates the result.  On the CPU or in fp32 the host reads the offsets."""
    if len(q) == 0 or len(k) == 0:
        return torch.zeros_like(q)
    if has_flash(q):
        max_queries = longest_queries(q, cu_seqlens_q, max_seqlen_q)
        flash_outputs = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_queries,
            max_seqlen_k,
            0.0,
            causal,
            False,
            scale=never_zero(get_scale(q, softmax_scale)),
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )
        attention_result: Tensor = flash_outputs[0]
        return attention_result
    sequence_outputs = [
        call(q[None, query_slice], k[None, key_slice], v[None, key_slice], causal, softmax_scale)[0]
        for query_slice, key_slice in spans(cu_seqlens_q, cu_seqlens_k)
    ]
    return torch.cat(sequence_outputs)
