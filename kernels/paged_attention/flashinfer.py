"""FlashInfer's paged attention (Ye et al., arXiv 2501.01005), the package `flashinfer-python`, if it is installed.

Decode steps go to `BatchDecodeWithPagedKVCacheWrapper`, chunks of queries to `BatchPrefillWithPagedKVCacheWrapper`,
both with the backend that FlashInfer chooses.  `plan` reads the lengths and the table once per step for all layers, and
the bench does not time it: see `_flashinfer`.  A log-sum-exp takes one more launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import Returned, unseen
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import check_all_pages
from rooflab.kernels.paged_attention._args import traffic as in_pages
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic

TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which decoding uses tensor cores, as in SGLang; CUDA cores take only groups of 1, 2, 3,
4, 6 and 8."""


def traffic(inputs: Arguments) -> Traffic:
    """The visible keys and values once; FlashInfer decides how to split keys, so partial results are not counted."""
    return adapter.with_base_e(in_pages(inputs), inputs.q, inputs.return_lse)


def unsupported(inputs: Arguments) -> str | None:
    """Why FlashInfer cannot take these inputs, or None; pages may have any size."""
    return adapter.why_not({"q": inputs.q, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache})


def plan_of(
    kept: bool,
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    softcap: float | None,
) -> adapter.FlashInferPlan:
    """A plan for `run`, in the wrapper of all calls (`kept`) or in a new one; q and k_cache may be on `meta`."""
    T, H, D = q.shape
    _, block_size, H_kv, _ = k_cache.shape
    device = block_table.device
    pages = adapter.read_pages(block_table, seq_lens, block_size)
    if not T or not len(pages.indices):
        return adapter.FlashInferPlan(None, None)
    bounds = torch.arange(T + 1, dtype=torch.int32) if cu_seqlens_q is None else cu_seqlens_q.cpu()
    unseeing = adapter.unseeing_rows(bounds, pages.lengths, True, device)
    options = adapter.plan_options(q, softmax_scale, window, softcap)
    wrapper: Any
    if cu_seqlens_q is None:
        with_tensor_cores = {"use_tensor_cores": H // H_kv >= TENSOR_CORE_GROUP}
        name = "BatchDecodeWithPagedKVCacheWrapper"
        wrapper = adapter.wrapper_for(kept, name, device, q.dtype, D, "NHD", **with_tensor_cores)
        wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, H, H_kv, D, block_size, **options)
    else:
        wrapper = adapter.wrapper_for(kept, "BatchPrefillWithPagedKVCacheWrapper", device, q.dtype, D, "NHD")
        indptr, last = pages.indptr, pages.last_page_len
        if unseeing is not None:
            bounds, indptr = adapter.seeing_apart(bounds, pages.lengths), adapter.without_keys(indptr)
            last = torch.stack((torch.zeros_like(last), last), dim=1).flatten()
        wrapper.plan(bounds, indptr, pages.indices, last, H, H_kv, D, block_size, causal=True, **options)
    return adapter.FlashInferPlan(wrapper, unseeing)


def plan(inputs: Arguments) -> adapter.FlashInferPlan:
    """Work that an engine does once per step for all layers; waits for the device."""
    pages = inputs.k_cache, inputs.block_table, inputs.seq_lens
    return plan_of(False, inputs.q, *pages, inputs.softmax_scale, inputs.cu_seqlens_q, inputs.window, inputs.softcap)


@kernel(
    role="peer", backend="cuda", min_sm=80, devices=("cuda",), requires=(adapter.PACKAGE,), unsupported=unsupported,
    aligned=("q", "k_cache", "v_cache"), traffic=traffic, plan=plan,
)  # fmt: skip
def flashinfer(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    return_lse: bool, plan: adapter.FlashInferPlan | None,
) -> Returned:  # fmt: skip
    """Batch decode or batch prefill, which write rows without gaps.  Without a plan it makes one, and waits for the
    device to read the lengths and the table."""
    check_all_pages(q, k_cache, block_table, seq_lens, cu_seqlens_q)
    if plan is None:
        plan = plan_of(True, q, k_cache, block_table, seq_lens, softmax_scale, cu_seqlens_q, window, softcap)
    if plan.wrapper is None:
        return unseen(q, return_lse)
    return adapter.finished(plan.wrapper.run(q, (k_cache, v_cache), return_lse=return_lse), plan.unseeing)
