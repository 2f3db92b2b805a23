"""FlashInfer's prefill of ragged sequences (Ye et al., arXiv 2501.01005), `flashinfer-python`, if it is installed.

`plan` reads the offsets once per step for all layers, and the bench does not time it: see `_flashinfer`.  A
log-sum-exp takes one more launch.
"""

from __future__ import annotations

import math

import torch

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import Returned
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.flash_attention_varlen.flash_attention_3 import traffic as in_one_launch
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.attention import check_options
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its queries."""
    return adapter.with_base_e(in_one_launch(inputs), inputs.q, inputs.return_lse)


def unsupported(inputs: Arguments) -> str | None:
    """Why FlashInfer cannot take these inputs, or None."""
    return adapter.why_not({"q": inputs.q, "k": inputs.k, "v": inputs.v})


def plan_of(
    kept: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
) -> adapter.FlashInferPlan:
    """A plan for `run`, in the wrapper of all calls (`kept`) or in a new one; q and k may be on `meta`."""
    T, H, D = q.shape
    if not T * len(k):
        return adapter.FlashInferPlan(None, None)
    device = cu_seqlens_q.device
    queries, keys = cu_seqlens_q.cpu(), cu_seqlens_k.cpu()
    wrapper = adapter.wrapper_for(kept, "BatchPrefillWithRaggedKVCacheWrapper", device, q.dtype, D, "NHD")
    options = adapter.plan_options(q, softmax_scale, window, softcap)
    return adapter.plan_ragged(wrapper, (queries, keys), (H, k.shape[1], D), causal, device, options)


def plan(inputs: Arguments) -> adapter.FlashInferPlan:
    """Work that an engine does once per step for all layers; waits for the device."""
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    options = inputs.causal, inputs.softmax_scale, inputs.window, inputs.softcap
    return plan_of(False, inputs.q, inputs.k, *offsets, *options)


@register(
    op="flash_attention_varlen", name="flashinfer", role="peer", backend="cuda", min_sm=80, devices=("cuda",),
    requires=(adapter.PACKAGE,), unsupported=unsupported, traffic=traffic, plan=plan,
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
    plan: adapter.FlashInferPlan | None = None,
) -> Returned:
    """`BatchPrefillWithRaggedKVCacheWrapper`.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    Without a plan it makes one, and waits for the device to read the offsets.  There is no `out`, because FlashInfer
    writes rows without gaps.  Raises `ValueError` on wrong shapes, dtypes, strides or options.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, softcap, None)
    reason = adapter.why_not({"q": q, "k": k, "v": v})
    if reason:
        raise ValueError(reason)
    plan = plan or plan_of(True, q, k, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, window, softcap)
    if plan.wrapper is None:
        lse = torch.full(q.shape[:2], -math.inf, device=q.device)
        return (torch.zeros_like(q), lse) if return_lse else torch.zeros_like(q)
    return adapter.finished(plan.wrapper.run(q, k, v, return_lse=return_lse), plan.unseeing)
