"""Implements the kernel `online`, the version after `naive`: one launch for all sequences, with an online softmax (Dao,
"FlashAttention-2", 2023).

A program computes a tile of queries of one sequence and head. It exits at once if its tile is past the sequence's end.
Last rows come first, because in a causal sequence they see the most keys. A long tile at the end would delay the kernel
(longest processing time first, Graham, 1969).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import options, traffic
from rooflab.kernels._attention_configs import Config, by_pointers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, load_tile, weigh
from rooflab.reference.spec import Arguments

TUNING = by_pointers(weights=False, others=32)


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["tiles", "sequences", "window"])
def online_varlen_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, out_ptr, lse_ptr, tiles, sequences, H, group, window, scale,
    factor, cap, q_stride_t, q_stride_h, k_stride_s, k_stride_h, v_stride_s, v_stride_h, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    program_id = tl.program_id(0)
    # Tiles of the same number of all sequences and heads are neighbours; the last rows come first.
    tile = tiles - 1 - program_id // (sequences * H)
    b = program_id // H % sequences
    h = (program_id % H).to(tl.int64)
    first_q_row = tl.load(cu_q_ptr + b)
    T = tl.load(cu_q_ptr + b + 1) - first_q_row
    first_row = tile * BLOCK_M
    if first_row >= T:
        return
    first_k_row = tl.load(cu_k_ptr + b)
    S = tl.load(cu_k_ptr + b + 1) - first_k_row
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    # int64, because offsets of token and head pass 2**31 elements in a long batch.
    tokens = (first_q_row + rows).to(tl.int64)
    q_mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + tokens[:, None] * q_stride_t + h * q_stride_h + dims[None, :], mask=q_mask, other=0.0)
    k_base = k_ptr + first_k_row.to(tl.int64) * k_stride_s + h // group * k_stride_h
    v_base = v_ptr + first_k_row.to(tl.int64) * v_stride_s + h // group * v_stride_h
    last_row = tl.minimum(first_row + BLOCK_M, T) - 1
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    range_ends = key_tiles(first_row, last_row, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    for range_index in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
        for k_start in range(range_ends[range_index], range_ends[range_index + 1], BLOCK_N):
            keys = k_start + tl.arange(0, BLOCK_N)
            key_indices = keys.to(tl.int64)  # a key times its stride passes 2**31 elements in a long context
            dim_mask = dims < HEAD_DIM
            k_ptrs = k_base + key_indices[None, :] * k_stride_s + dims[:, None]
            v_ptrs = v_base + key_indices[:, None] * v_stride_s + dims[None, :]
            k = load_tile(k_ptrs, (keys < S)[None, :], dim_mask[:, None], range_index != 1, BLOCK_D > HEAD_DIM)
            scores = tl.dot(q, k, input_precision="ieee")
            weights, rescale_factor, m_i, l_i = weigh(
                scores, m_i, l_i, k_start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED,
                range_index != 1, BLOCK_N,
            )  # fmt: skip
            v = load_tile(v_ptrs, (keys < S)[:, None], dim_mask[None, :], range_index != 1, BLOCK_D > HEAD_DIM)
            acc = tl.dot(weights.to(v.dtype), v, acc * rescale_factor[:, None], input_precision="ieee")
    out_rows = tokens * out_stride_t + h * out_stride_h
    lse_rows = tokens * lse_stride_t + h * lse_stride_h
    finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  A sequence gets CTAs for `max_seqlen_q` queries."""
    H, B = of.q.shape[1], len(of.cu_seqlens_q) - 1
    tiles = cdiv(of.max_seqlen_q, of.config.block_m)
    scalar_args, strides, constexpr_args = options(of, of.max_seqlen_k)
    input_strides = *of.q.stride()[:2], *of.k.stride()[:2], *of.v.stride()[:2]
    return (tiles * B * H,), (tiles, B, H, H // of.k.shape[1], *scalar_args, *input_strides, *strides), constexpr_args


@kernel(
    backend="triton",
    limits={"D": range(16, 257)},
    traffic=traffic,
    tuning=TUNING,
    bind=bind,
    fenced_since="3.7.1",
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 20 and launched == 1; '
            "len(loops) == 2 and products[0].FSEL <= 2 and products[1].FSEL >= 32; "
            "all(loop.wgmma and loop.cp_async and not loop.global_store for loop in loops)"
        )
    },
)
def online(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor | None, *,
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, return_lse: bool, config: Config, bound: Any,
) -> None:  # fmt: skip
    """Computes attention of all sequences in a single launch.  Writes nothing for rows of `q` behind the last sequence.
    On a GPU, such rows raise an error only if `ROOFLAB_CHECK_VALUES` is set in the environment."""
    grid, scalar_args, constexpr_args = bound
    if grid[0]:
        online_varlen_kernel[grid](q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, out, lse, *scalar_args, **constexpr_args)
