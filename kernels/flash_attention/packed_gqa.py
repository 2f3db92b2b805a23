"""Implements the kernel `packed_gqa`, the version after `tma`: query heads with the same key head share a tile's rows.

A tile of `tma` has rows of one query head. So a short query (a chunk of a prefill, or a few draft tokens) leaves most
rows empty, and each query head of a group loads the same keys. Here row `r` is position `r // group` of query head `r %
group`. For example, 16 queries with a group of 4 fill 64 rows and load a tile of keys once. Pointers load q and store
the result row by row, because a tensor map has no box for a group. There are fewer tiles than in `tma`, so fewer SMs
may be busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import nothing_seen, options, traffic
from rooflab.kernels._attention_configs import Config
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._by_tma import ROWS_OF_DEFAULTS, configs, footprint, tensor_map
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, row_offsets, weigh
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import BF16, Defaults, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme


def grouped_rows(case: Case, scheme: Scheme) -> Mapping[str, int]:
    """Returns the numbers that select a config: `rows` (query rows per key head) and `heads` (key heads in total)."""
    H = int(case["H"])
    H_kv = int(case.get("H_kv", H))
    return {"rows": int(case["T"]) * (H // H_kv), "heads": H_kv * int(case["B"])}


def packed_tiles(config: Config, case: Case) -> int:
    """Returns the number of tiles, over all key heads."""
    group_sizes = grouped_rows(case, BF16)
    return cdiv(group_sizes["rows"], config.block_m) * group_sizes["heads"]


DEFAULTS = Defaults(
    (
        ({"rows": 64, "D": 64}, Config(64, 64, 4, 3)),
        ({"rows": 64, "D": 128}, Config(64, 128, 4, 2)),
        ({"rows": 64}, Config(64, 64, 4, 2)),
        *ROWS_OF_DEFAULTS,
    ),
    grouped_rows,
)


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_ptr, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, T, S, H_kv, group, window, scale, factor, cap,
    q_stride_b, q_stride_t, q_stride_h, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t,
    lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(T * group, BLOCK_M)
    b = tl.program_id(0) // row_tiles // H_kv
    h_kv = tl.program_id(0) // row_tiles % H_kv
    first_row = tl.program_id(0) % row_tiles * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, T * group) - 1
    packed_rows = first_row + tl.arange(0, BLOCK_M)
    rows = packed_rows // group
    dims = tl.arange(0, BLOCK_D)
    heads = h_kv * group + packed_rows % group
    q_mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = row_offsets(b, heads, rows, q_stride_b, q_stride_t, q_stride_h)
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    first_position = first_row // group
    last_position = last_row // group
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    range_ends = key_tiles(first_position, last_position, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    for range_index in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
        for k_start in range(range_ends[range_index], range_ends[range_index + 1], BLOCK_N):
            k = k_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
            scores = tl.dot(q, k.T)
            weights, rescale_factor, m_i, l_i = weigh(
                scores, m_i, l_i, k_start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED,
                range_index != 1, BLOCK_N,
            )  # fmt: skip
            # Past the keys' end TMA gives zeros, so values need no mask.
            v = v_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
            acc *= rescale_factor[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc)
    out_rows = row_offsets(b, heads, rows, out_stride_b, out_stride_t, out_stride_h)
    lse_rows = row_offsets(b, heads, rows, lse_stride_b, lse_stride_t, lse_stride_h)
    finish(acc, m_i, l_i, sinks_ptr, heads * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  The grid has one CTA per tile."""
    (_, T, H, _), (B, S, H_kv, _), config = of.q.shape, of.k.shape, of.config
    group = H // H_kv
    tensor_maps = tensor_map(of.k, config.block_n), tensor_map(of.v, config.block_n)
    scalar_args, strides, constexpr_args = options(of, S)
    grid = (cdiv(T * group, config.block_m) * B * H_kv,)
    return grid, tensor_maps, (T, S, H_kv, group, *scalar_args, *of.q.stride()[:3], *strides), constexpr_args


@kernel(
    backend="triton",
    min_sm=90,
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(16, 257, 8)},
    mapped={"k": -1, "v": -1},
    traffic=traffic,
    tuning=Tuning(Config, configs, DEFAULTS, footprint(packed_tiles)),
    bind=bind,
    empty=nothing_seen,
    over="tma",
    shows={
        "B=1,T=16,S=2048,H=32,H_kv=8,D=128,causal=true": (
            "below.grid[0] == 32 and grid[0] == 8 and (below.threads, threads) == (256, 128); "
            "len(products) == 2 and all(loop.tma == 2 and loop.WARPGROUP_DEPBAR == 1 for loop in products)"
        )
    },
)
def packed_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool,
    softmax_scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    config: Config,
    bound: Any,
) -> None:
    """Computes attention in tiles.  The rows of a tile are the queries of all heads that share a key head."""
    grid, (k_map, v_map), scalar_args, constexpr_args = bound
    _attention[grid](q, k_map(k), v_map(v), sinks, out, lse, *scalar_args, **constexpr_args)
