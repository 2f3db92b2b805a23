"""Calls FlashInfer's attention over latents (Ye et al., arXiv 2501.01005), package `flashinfer-python`, for comparison.

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
from rooflab.kernels.mla_decode.split_kv import latents_once
from rooflab.reference.spec import Arguments

LATENT_DIM, ROTARY_DIM = 512, 64
"""The sizes of DeepSeek-V2.  FlashInfer's kernels are built only for these sizes."""


def plan_of(inputs: Arguments, wrapper_of: Callable[..., Any] = adapter.make_wrapper) -> adapter.FlashInferPlan:
    """Makes FlashInfer's plan for all layers of a step.  Waits for the device.  `q`, `kv_cache` may be on `meta`."""
    q, kv_cache, device = inputs.q, inputs.kv_cache, inputs.block_table.device
    B, H, _ = q.shape
    page_lists = adapter.read_pages(inputs.block_table, inputs.seq_lens, kv_cache.shape[1])
    if not B or not len(page_lists.indices):
        return adapter.FlashInferPlan()
    query_bounds = torch.arange(B + 1, dtype=torch.int32)
    wrapper = wrapper_of("BatchMLAPagedAttentionWrapper", device, q.dtype, LATENT_DIM)
    wrapper.plan(
        qo_indptr=query_bounds,
        kv_indptr=page_lists.indptr,
        kv_indices=page_lists.indices,
        kv_len_arr=page_lists.lengths,
        num_heads=H,
        head_dim_ckv=LATENT_DIM,
        head_dim_kpe=ROTARY_DIM,
        page_size=kv_cache.shape[1],
        causal=False,  # the one query sees its whole sequence
        sm_scale=inputs.softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=kv_cache.dtype,
    )
    return adapter.FlashInferPlan(wrapper, adapter.unseeing_rows(query_bounds, page_lists.lengths, True, device))


@kernel(
    role="peer",
    backend="cuda",
    min_sm=80,
    devices=("cuda",),
    requires=(adapter.PACKAGE,),
    limits={"latent_dim": (LATENT_DIM,), "D": (LATENT_DIM + ROTARY_DIM,)},
    whole={"q": -1, "kv_cache": -1},
    traffic=adapter.with_base_e(latents_once),
    plan=plan_of,
)
def flashinfer(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    latent_dim: int,
    softmax_scale: float,
    return_lse: bool,
    plan: adapter.FlashInferPlan | None,
) -> AttentionResult:
    """Calls `BatchMLAPagedAttentionWrapper`, which writes contiguous rows.  Without `plan`, the call makes a plan.  For
    a plan, the host reads the lengths and the table, and so waits for the device."""
    if plan is None:
        cache_inputs = {"kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
        plan = plan_of(Arguments(q=q, softmax_scale=softmax_scale, **cache_inputs), adapter.kept_wrapper)
    if plan.wrapper is None:
        return unseen(q[..., :latent_dim], return_lse)
    result = plan.wrapper.run(
        q_nope=q[..., :LATENT_DIM],
        q_pe=q[..., LATENT_DIM:],
        ckv_cache=kv_cache[..., :LATENT_DIM],
        kpe_cache=kv_cache[..., LATENT_DIM:],
        return_lse=return_lse,
    )
    return adapter.finished(result, plan.unseeing)
