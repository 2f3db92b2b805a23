"""Wraps FlashInfer's prefill of ragged sequences (Ye et al., arXiv 2501.01005) as a comparison kernel.

Needs the package `flashinfer-python`.  `plan` reads the offsets once per step for all layers.  The benchmark does not
measure the plan (see `kernels/_flashinfer.py`).  Another launch changes the log-sum-exp from base 2 to base e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import AttentionResult, traffic, unseen
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments


def plan_of(inputs: Arguments, wrapper_of: Callable[..., Any] = adapter.make_wrapper) -> adapter.FlashInferPlan:
    """Makes FlashInfer's plan for all layers of a step.  Reads the offsets, so it waits for the device."""
    (T, H, D), k, device = inputs.q.shape, inputs.k, inputs.cu_seqlens_q.device
    if not T * len(k):
        return adapter.FlashInferPlan()
    bounds = inputs.cu_seqlens_q.cpu(), inputs.cu_seqlens_k.cpu()
    wrapper = wrapper_of("BatchPrefillWithRaggedKVCacheWrapper", device, inputs.q.dtype, D, "NHD")
    return adapter.plan_ragged(wrapper, bounds, (H, k.shape[1], D), inputs.causal, device, adapter.plan_options(inputs))


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=(adapter.PACKAGE,),
    dtypes={"q": HALF_DTYPES},
    limits={"D": adapter.HEAD_DIMS},
    whole={"q": -1, "k": -1, "v": -1},
    holds={"v == k or S == 0": "the strides of k"},
    traffic=adapter.with_base_e(traffic),
    plan=plan_of,
)
def flashinfer(
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
    plan: adapter.FlashInferPlan | None,
) -> AttentionResult:
    """Calls `BatchPrefillWithRaggedKVCacheWrapper`.  If `plan` is None, makes a plan.  The host then
    waits for the device, because it reads the offsets from there."""
    if plan is None:
        plan_inputs = Arguments(
            q=q,
            k=k,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            softmax_scale=softmax_scale,
            window=window,
            softcap=softcap,
        )
        plan = plan_of(plan_inputs, adapter.kept_wrapper)
    if plan.wrapper is None:
        return unseen(q, return_lse)
    return adapter.finished(plan.wrapper.run(q, k, v, return_lse=return_lse), plan.unseeing)
