"""The kernel `chunked` improves on `gqa_packed`.  One launch serves query chunks (from `cu_seqlens_q`) and single
queries.

A tile has BLOCK_M rows of one sequence and one KV head.  A row is one query of one head of the group.  So a loaded key
serves all heads of the group, and a chunk of few queries fills a tile.  Prefill in chunks is from Agrawal et al.,
"SARATHI", 2023.

The grid has the largest possible number of tiles, and a program finds its sequence in `cu_seqlens_q` by bisection.  So
the host does not wait for the device.  docs/notes/paged_attention.md lists other ideas.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import options
from rooflab.kernels._attention_configs import Config
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, load_tile, pages_of, weigh
from rooflab.kernels.paged_attention._args import traffic
from rooflab.kernels.paged_attention._configs import CHUNKED_TUNING, tiles_at_most
from rooflab.reference.spec import Arguments


@triton.jit
def _first_query(cu_ptr, b):
    """Returns the index in q of the first query of sequence `b`.  If there are no offsets `cu_ptr`, each sequence has
    one query."""
    return tl.load(cu_ptr + b) if cu_ptr is not None else b


@triton.jit
def _sequence(tile, cu_ptr, B, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the sequence to which tile number `tile` belongs, found by bisection.

    A row of a tile is one query of one head.  Sequence b begins at tile `rows // BLOCK_M + b`, where `rows` is the
    number of rows before b.  The term b is for partial tiles: each sequence before b may end with one."""
    low_sequence = 0
    high_sequence = B
    while high_sequence - low_sequence > 1:
        middle_sequence = (low_sequence + high_sequence) // 2
        starts_after_tile = _first_query(cu_ptr, middle_sequence) * GROUP // BLOCK_M + middle_sequence > tile
        high_sequence = tl.where(starts_after_tile, middle_sequence, high_sequence)
        low_sequence = tl.where(starts_after_tile, low_sequence, middle_sequence)
    return low_sequence


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["B", "tiles", "window", "table_stride"])
def chunked_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, B, H_kv,
    tiles, window, scale, factor, cap, q_stride_t, q_stride_h, k_stride_block, k_stride_slot, k_stride_h,
    v_stride_block, v_stride_slot, v_stride_h, table_stride, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % H_kv
    tile = tiles - 1 - tl.program_id(0) // H_kv
    b = _sequence(tile, cu_ptr, B, GROUP, BLOCK_M)
    first_query = _first_query(cu_ptr, b)
    queries = _first_query(cu_ptr, b + 1) - first_query
    first_row = (tile - first_query * GROUP // BLOCK_M - b) * BLOCK_M
    if first_row >= queries * GROUP:
        return
    length = tl.load(lens_ptr + b)
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    dim_mask = dims < HEAD_DIM
    row_mask = rows < queries * GROUP
    token = (first_query + rows // GROUP).to(tl.int64)
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    q_rows = token * q_stride_t + head * q_stride_h
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=row_mask[:, None] & dim_mask[None, :], other=0.0)
    k_ptr += kv_head.to(tl.int64) * k_stride_h
    v_ptr += kv_head.to(tl.int64) * v_stride_h
    table_ptr += b.to(tl.int64) * table_stride
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, queries - 1)
    # Steps begin at the first visible key, anywhere in a page: earlier pages may have been freed.
    key_tile_bounds = key_tiles(first_row // GROUP, last_query, queries, length, window, CAUSAL, WINDOW, BLOCK_N)
    for key_range in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
        page = pages_of(table_ptr, key_tile_bounds[key_range], length, BLOCK_SIZE, BLOCK_N)
        for key_start in range(key_tile_bounds[key_range], key_tile_bounds[key_range + 1], BLOCK_N):
            keys = key_start + tl.arange(0, BLOCK_N)
            # int64, because page * stride and slot * stride pass 2**31 elements in a cache of 4 GiB.
            page64 = page.to(tl.int64)
            page = pages_of(table_ptr, key_start + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
            page_slot = (keys % BLOCK_SIZE).to(tl.int64)
            k_ptrs = k_ptr + (page64 * k_stride_block + page_slot * k_stride_slot)[None, :] + dims[:, None]
            v_ptrs = v_ptr + (page64 * v_stride_block + page_slot * v_stride_slot)[:, None] + dims[None, :]
            key_mask = keys < length
            k = load_tile(k_ptrs, key_mask[None, :], dim_mask[:, None], key_range != 1, BLOCK_D > HEAD_DIM).to(q.dtype)
            v = load_tile(v_ptrs, key_mask[:, None], dim_mask[None, :], key_range != 1, BLOCK_D > HEAD_DIM).to(q.dtype)
            scores = tl.dot(q, k, input_precision="ieee")
            if k_scale_ptr is not None:
                scores *= tl.load(k_scale_ptr + kv_head)
            weights, acc_scale, m_i, l_i = weigh(
                scores, m_i, l_i, key_start, rows // GROUP, length, queries, window, scale, factor, cap, CAUSAL, WINDOW,
                CAP, NEGATED, key_range != 1, BLOCK_N,
            )  # fmt: skip
            acc = tl.dot(weights.to(q.dtype), v, acc * acc_scale[:, None], input_precision="ieee")
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head)
    out_rows = token * out_stride_t + head * out_stride_h
    lse_rows = token * lse_stride_t + head * lse_stride_h
    finish(acc, m_i, l_i, sinks_ptr, head * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, row_mask, HEAD_DIM)


def launch(of: Arguments) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Computes a launch: the number of CTAs (one per possible tile and KV head), sizes and strides, and constants."""
    (T, H, _), B, (_, block_size, H_kv, _) = of.q.shape, len(of.seq_lens), of.k_cache.shape
    tiles = tiles_at_most(T, B, H // H_kv, of.config.block_m)
    scalar_args, strides, constant_args = options(of.but(causal=True), of.block_table.shape[1] * block_size)
    input_strides = *of.q.stride()[:2], *of.k_cache.stride()[:3], *of.v_cache.stride()[:3], of.block_table.stride(0)
    constant_args |= {"BLOCK_SIZE": block_size, "GROUP": H // H_kv}
    return tiles * H_kv, (B, H_kv, tiles, *scalar_args, *input_strides, *strides), constant_args


@kernel(
    backend="triton",
    limits={"D": range(1, 257)},
    traffic=traffic,
    bind=launch,
    tuning=CHUNKED_TUNING,
    fenced_since="3.7.1",
    over="gqa_packed",
    shows={
        "B=1,context=65536,H=32,H_kv=8,D=128,block_size=16,ragged=false": (
            "below.mma > below.wgmma == 0 and mma > 0 and shared_bytes > below.shared_bytes"
        ),
        "B=4,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false,queries=512": (
            "launched == 1 and stack_bytes == 0 and [loop.wgmma for loop in products] == [12, 12]; "
            "products[0].cp_async > 0 and products[0].length < 0.9 * products[1].length"
        ),
    },
)
def chunked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: Config,
    bound: Any,
) -> None:  # fmt: skip
    """Computes attention with any block_size.  Each cache may be e4m3 (fp8).  The host does not wait for the device."""
    ctas, scalar_args, constant_args = bound
    chunked_kernel[(ctas,)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        sinks,
        k_scale,
        v_scale,
        out,
        lse,
        *scalar_args,
        **constant_args,
    )
