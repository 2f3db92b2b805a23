"""The kernel `gqa_packed` improves on `naive`: it reads the block table itself (Kwon et al., "PagedAttention", SOSP
2023).

A program computes one sequence and one KV head.  The query heads of the group are the rows of one matmul, because a
single head would use one of a tensor core's 16 rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import LOG2E, get_scale
from rooflab.kernels.launcher import kernel
from rooflab.kernels.paged_attention._args import traffic
from rooflab.kernels.paged_attention._configs import GQA_PACKED_TUNING, StepConfig, packed_rows
from rooflab.reference.spec import Arguments


# A table's width may change with every batch; if Triton specialized it, a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["table_stride"])
def gqa_packed_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, group, scale_log2, q_stride_t, q_stride_h, k_stride_block,
    k_stride_slot, k_stride_h, v_stride_block, v_stride_slot, v_stride_h, table_stride, out_stride_t, out_stride_h,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    length = tl.load(lens_ptr + b)
    heads = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    head_mask = heads[:, None] < group
    query_heads = kv_head * group + heads
    q_offsets = b * q_stride_t + query_heads[:, None] * q_stride_h + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=head_mask, other=0.0)

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for block_start in range(0, length, BLOCK_N):
        keys = block_start + tl.arange(0, BLOCK_N)
        key_mask = keys < length
        # int64, because page * stride and slot * stride pass 2**31 in a cache of 4 GiB. No entry past the end is read.
        page_ids = tl.load(table_ptr + b * table_stride + keys // BLOCK_SIZE, mask=key_mask, other=0).to(tl.int64)
        page_slot = (keys % BLOCK_SIZE).to(tl.int64)
        k_offsets = page_ids * k_stride_block + page_slot * k_stride_slot + kv_head * k_stride_h
        k = tl.load(k_ptr + k_offsets[None, :] + dims[:, None], mask=key_mask[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        scores = tl.where(key_mask[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        weights = tl.exp2(scores - m_new[:, None])
        acc_scale = tl.exp2(m_i - m_new)
        l_i = l_i * acc_scale + tl.sum(weights, 1)
        # Values are masked too: a page's unused slots may hold NaN, and 0 * NaN is NaN.
        v_offsets = page_ids * v_stride_block + page_slot * v_stride_slot + kv_head * v_stride_h
        v = tl.load(v_ptr + v_offsets[:, None] + dims[None, :], mask=key_mask[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * acc_scale[:, None], input_precision="ieee")
        m_i = m_new

    result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_offsets = b * out_stride_t + query_heads[:, None] * out_stride_h + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=head_mask)


def launch(of: Arguments) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Computes a launch: the grid (a program for each sequence and KV head), sizes and strides, and constants."""
    (B, H, D), (_, block_size, H_kv, _) = of.q.shape, of.k_cache.shape
    scalar_args = (
        H // H_kv,
        get_scale(of.q, of.softmax_scale) * LOG2E,
        *of.q.stride()[:2],
        *of.k_cache.stride()[:3],
        *of.v_cache.stride()[:3],
        of.block_table.stride(0),
        *of.out.stride()[:2],
    )
    constant_args = {"BLOCK_SIZE": block_size, "HEAD_DIM": D, "BLOCK_M": packed_rows(H, H_kv)}
    return (B, H_kv), scalar_args, constant_args | of.config.launch_arguments


@kernel(
    backend="triton",
    limits={"D": (16, 32, 64, 128, 256)},
    traffic=traffic,
    bind=launch,
    tuning=GQA_PACKED_TUNING,
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 15 and launched == 1; '
            "loop.mma > 0 and loop.cp_async > 0 and loop.global_store == 0"
        ),
        "B=1,context=65536,H=32,H_kv=8,D=128,block_size=16,ragged=false": "grid == (1, 8)",
    },
)
def gqa_packed(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    softmax_scale: float | None,
    config: StepConfig,
    bound: Any,
) -> None:
    """Computes decode attention.  The query heads of a group share one read of the keys."""
    grid, scalar_args, constant_args = bound
    gqa_packed_kernel[grid](q, k_cache, v_cache, block_table, seq_lens, out, *scalar_args, **constant_args)
