"""Implements the kernel `tma`, the version after `masked_tiles`: the tensor memory accelerator (TMA) loads the tiles of
q, k and v.

One thread issues the load of a tile. With cp.async every thread spends registers and issue slots on addresses and
masks. TMA gives zeros beyond the end of a sequence and of a head, so no load needs a mask. A tensor map costs the host
a driver call per launch. It needs addresses and strides that are multiples of 16 bytes.
"""

from __future__ import annotations

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
from rooflab.kernels.tuning import Defaults, Tuning
from rooflab.reference.spec import Arguments

TUNING = Tuning(Config, configs, Defaults(ROWS_OF_DEFAULTS), footprint())


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, T, S, H, group, window, scale, factor, cap,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // row_tiles // H
    h = tl.program_id(0) // row_tiles % H
    first_row = tl.program_id(0) % row_tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    # One thread starts the copy; all warps wait at a barrier in shared memory, on which TMA counts the bytes.
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    h_kv = h // group
    last_row = tl.minimum(first_row + BLOCK_M, T) - 1
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    range_ends = key_tiles(first_row, last_row, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    for range_index in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
        # The compiler makes a ring of num_stages tiles of k, and one of v: their copies run while earlier tiles are
        # multiplied, each stage with a barrier of its own.
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
    out_rows = row_offsets(b, h, rows, out_stride_b, out_stride_t, out_stride_h)
    lse_rows = row_offsets(b, h, rows, lse_stride_b, lse_stride_t, lse_stride_h)
    finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  The grid is 1D: a grid's y and z end at 65,535."""
    (B, T, H, _), (_, S, H_kv, _), config = of.q.shape, of.k.shape, of.config
    tensor_maps = tensor_map(of.q, config.block_m), tensor_map(of.k, config.block_n), tensor_map(of.v, config.block_n)
    scalar_args, strides, constexpr_args = options(of, S)
    return (cdiv(T, config.block_m) * B * H,), tensor_maps, (T, S, H, H // H_kv, *scalar_args, *strides), constexpr_args


@kernel(
    backend="triton",
    min_sm=90,
    dtypes={"q": HALF_DTYPES},
    limits={"D": range(16, 257, 8)},
    mapped={"q": -1, "k": -1, "v": -1},
    traffic=traffic,
    tuning=TUNING,
    bind=bind,
    empty=nothing_seen,
    over="masked_tiles",
    shows={
        "B=1,T=2048,S=2048,H=32,H_kv=8,D=128,causal=true with block_m=128,block_n=64,num_warps=8,num_stages=2": (
            "below.products[0].cp_async == 8 and below.products[0].tma == cp_async == global_load == 0; "
            "all(loop.tma == 2 and loop.WARPGROUP_DEPBAR == 1 for loop in products) and products[0].FSEL == 0; "
            "products[0].length < below.products[0].length and registers < below.registers"
        )
    },
)
def tma(
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
    """Computes attention; one thread of a CTA loads the tiles of q, k and v by TMA.  TMA gives zeros past the ends."""
    grid, (q_map, k_map, v_map), scalar_args, constexpr_args = bound
    _attention[grid](q_map(q), k_map(k), v_map(v), sinks, out, lse, *scalar_args, **constexpr_args)
