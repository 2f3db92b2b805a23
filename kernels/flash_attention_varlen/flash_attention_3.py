"""Wraps the authors' package of FlashAttention-3 (Shah et al., arXiv 2407.08608) as a comparison kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from rooflab.kernels._attention import AttentionResult, traffic
from rooflab.kernels.flash_attention.flash_attention_3 import PACKAGE, window_sizes
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES


@kernel(
    role="peer",
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=(PACKAGE,),
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(0, 257, 8)},
    traffic=traffic,
)
def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> AttentionResult:
    """Calls `flash_attn_varlen_func`, which allocates the result.  Returns its log-sum-exp `[H, T]` as `[T, H]`."""
    fa3_package: Any = import_module(PACKAGE)
    attention_result = fa3_package.flash_attn_varlen_func(
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
    return (attention_result[0], attention_result[1].mT) if return_lse else attention_result
