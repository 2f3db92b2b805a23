"""FlashAttention-3 with offsets (Shah et al., arXiv 2407.08608), the package of its authors, if it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._attention import Returned
from rooflab.kernels.flash_attention.flash_attention_3 import PACKAGE, window_sizes
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries."""
    q = inputs.q
    lse = 4 * q.shape[0] * q.shape[1] if inputs.return_lse else 0
    return Traffic(nbytes(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k), nbytes(q) + lse)


def unsupported(inputs: Arguments) -> str | None:
    """Why the package cannot take these inputs, or None."""
    q = inputs.q
    if q.dtype == torch.float32:
        return "takes fp16 and bf16, got fp32"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"needs a head_dim of at most 256 in multiples of 8, got {q.shape[-1]}"
    return None


@register(
    op="flash_attention_varlen", name="flash_attention_3", role="peer", backend="cuda", min_sm=90, devices=("cuda",),
    requires=(PACKAGE,), unsupported=unsupported, traffic=traffic,
)  # fmt: skip
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Returned:
    """`flash_attn_varlen_func`.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    The package allocates the result, so there is no `out`; its log-sum-exp (H, T) is returned as a view (T, H).  Raises
    `ValueError` on wrong shapes, dtypes or options.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, softcap, None)
    library: Any = import_module(PACKAGE)
    result = library.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_sizes(window),
        softcap=softcap or 0.0,
        return_attn_probs=return_lse,
    )
    return (result[0], result[1].mT) if return_lse else result
