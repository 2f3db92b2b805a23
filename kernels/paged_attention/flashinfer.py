"""Calls FlashInfer's paged attention (Ye et al., arXiv 2501.01005), package `flashinfer-python`, for comparison.

FlashInfer's function `plan` reads the lengths and the block table once per step, for all layers.  The bench does not
time `plan`; `_flashinfer` says why.  A log-sum-exp takes one more launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels import _flashinfer as adapter
from rooflab.kernels._attention import AttentionResult, unseen
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import check_all_pages, traffic
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments

MIN_TENSOR_CORE_GROUP = 4
"""The number of query heads per KV head from which decoding uses tensor cores, as in SGLang.  The kernels for CUDA
cores take only groups of 1, 2, 3, 4, 6 and 8."""


def plan_of(inputs: Arguments, wrapper_of: Callable[..., Any] = adapter.make_wrapper) -> adapter.FlashInferPlan:
    """Makes FlashInfer's plan for all layers of a step.  Waits for the device.  `q`, `k_cache` may be on `meta`."""
    q, cu_seqlens_q = inputs.q, inputs.cu_seqlens_q
    T, H, D = q.shape
    _, block_size, H_kv, _ = inputs.k_cache.shape
    device = inputs.block_table.device
    pages = adapter.read_pages(inputs.block_table, inputs.seq_lens, block_size)
    if not T or not len(pages.indices):
        return adapter.FlashInferPlan()
    bounds = torch.arange(T + 1, dtype=torch.int32) if cu_seqlens_q is None else cu_seqlens_q.cpu()
    rows_without_keys = adapter.unseeing_rows(bounds, pages.lengths, True, device)
    plan_options = adapter.plan_options(inputs)
    if cu_seqlens_q is None:
        with_tensor_cores = {"use_tensor_cores": H // H_kv >= MIN_TENSOR_CORE_GROUP}
        wrapper = wrapper_of("BatchDecodeWithPagedKVCacheWrapper", device, q.dtype, D, "NHD", **with_tensor_cores)
        wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, H, H_kv, D, block_size, **plan_options)
    else:
        wrapper = wrapper_of("BatchPrefillWithPagedKVCacheWrapper", device, q.dtype, D, "NHD")
        indptr, last_page_lens = pages.indptr, pages.last_page_len
        if rows_without_keys is not None:
            bounds, indptr = adapter.seeing_apart(bounds, pages.lengths), adapter.without_keys(indptr)
            last_page_lens = torch.stack((torch.zeros_like(last_page_lens), last_page_lens), dim=1).flatten()
        wrapper.plan(bounds, indptr, pages.indices, last_page_lens, H, H_kv, D, block_size, causal=True, **plan_options)
    return adapter.FlashInferPlan(wrapper, rows_without_keys)


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=(adapter.PACKAGE,),
    dtypes={"q": HALF_DTYPES},
    limits={"D": adapter.HEAD_DIMS},
    whole={"q": -1, "k_cache": -1, "v_cache": -1},
    holds={"v_cache == k_cache or num_blocks * block_size * H_kv == 0": "the strides of k_cache"},
    traffic=adapter.with_base_e(traffic),
    plan=plan_of,
)
def flashinfer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float | None,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
    plan: adapter.FlashInferPlan | None,
) -> AttentionResult:
    """Calls batch decode or batch prefill, which write contiguous rows.  Without `plan`, the call makes a plan.  For a
    plan, the host reads the lengths and the table, and so waits for the device."""
    check_all_pages(q, k_cache, block_table, seq_lens, cu_seqlens_q)
    if plan is None:
        op_arguments = Arguments(
            q=q,
            k_cache=k_cache,
            block_table=block_table,
            seq_lens=seq_lens,
            softmax_scale=softmax_scale,
            cu_seqlens_q=cu_seqlens_q,
            window=window,
            softcap=softcap,
        )
        plan = plan_of(op_arguments, adapter.kept_wrapper)
    if plan.wrapper is None:
        return unseen(q, return_lse)
    return adapter.finished(plan.wrapper.run(q, (k_cache, v_cache), return_lse=return_lse), plan.unseeing)
