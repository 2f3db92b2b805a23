"""FlashInfer's prefill of ragged sequences (Ye et al., arXiv 2501.01005), `flashinfer-python`, if it is installed.

`plan` reads the offsets once per step for all layers, and the bench does not time it: see `_flashinfer`.  A
log-sum-exp takes one more launch.
"""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import Returned, unseen
from rooflab.kernels.flash_attention_varlen import _args
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its queries."""
    return adapter.with_base_e(_args.traffic(inputs), inputs.q, inputs.return_lse)


def unsupported(inputs: Arguments) -> str | None:
    """Why FlashInfer cannot take these inputs, or None."""
    return adapter.why_not({"q": inputs.q, "k": inputs.k, "v": inputs.v})


def plan_of(
    kept: bool,
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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


@kernel(
    role="peer", backend="cuda", min_sm=80, devices=("cuda",), requires=(adapter.PACKAGE,), unsupported=unsupported,
    aligned=("q", "k", "v"), traffic=traffic, plan=plan,
)  # fmt: skip
def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None, window: int | None,
    softcap: float | None, return_lse: bool, plan: adapter.FlashInferPlan | None,
) -> Returned:  # fmt: skip
    """`BatchPrefillWithRaggedKVCacheWrapper`, which writes rows without gaps.  Without a plan it makes one, and waits
    for the device to read the offsets."""
    plan = plan or plan_of(True, q, k, cu_seqlens_q, cu_seqlens_k, causal, softmax_scale, window, softcap)
    if plan.wrapper is None:
        return unseen(q, return_lse)
    return adapter.finished(plan.wrapper.run(q, k, v, return_lse=return_lse), plan.unseeing)
