"""Implements the kernel `masked_tiles`, the version after `online`: applies a mask only in tiles that need a mask.

The causal diagonal, the window's far end and the end of the keys cross only a few key tiles. Separate loops compute
these tiles. The loop over the other tiles has no comparisons and no predicated loads. A score in this loop costs one
multiply-add and one exponential. `online` has no window, soft cap or sinks, because these would take time in all its
tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import options, traffic
from rooflab.kernels._attention_configs import Config, by_pointers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, load_tile, row_offsets, weigh
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments

TUNING = by_pointers()


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, T, S, H, group, window, scale, factor, cap,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context.
    row_tiles = tl.cdiv(T, BLOCK_M)
    b = (tl.program_id(0) // row_tiles // H).to(tl.int64)
    h = (tl.program_id(0) // row_tiles % H).to(tl.int64)
    first_row = tl.program_id(0) % row_tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = row_offsets(b, h, rows, q_stride_b, q_stride_t, q_stride_h)
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    k_base = k_ptr + b * k_stride_b + (h // group) * k_stride_h
    v_base = v_ptr + b * v_stride_b + (h // group) * v_stride_h
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
    out_rows = row_offsets(b, h, rows, out_stride_b, out_stride_t, out_stride_h)
    lse_rows = row_offsets(b, h, rows, lse_stride_b, lse_stride_t, lse_stride_h)
    finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  The grid is 1D: a grid's y and z end at 65,535."""
    (B, T, H, _), (_, S, H_kv, _) = of.q.shape, of.k.shape
    scalars, strides, constexprs = options(of, S)
    input_strides = *of.q.stride()[:3], *of.k.stride()[:3], *of.v.stride()[:3]
    return (cdiv(T, of.config.block_m) * B * H,), (T, S, H, H // H_kv, *scalars, *input_strides, *strides), constexprs


@kernel(
    backend="triton",
    dtypes={"q": (torch.float32, *HALF_DTYPES)},
    limits={"D": range(16, 257)},
    traffic=traffic,
    tuning=TUNING,
    bind=bind,
    fenced_since="3.7.1",
    over="online",
    shows={
        "B=1,T=2048,S=2048,H=32,H_kv=8,D=128,causal=true with block_m=128,block_n=64,num_warps=8,num_stages=2": (
            "len(products) == 2 and all(loop.spill_load + loop.spill_store == 0 for loop in products); "
            "products[0].FSEL == 0 and products[1].FSEL > 32 and below.loop.FSEL > 32; "
            "products[0].length < 0.7 * below.loop.length and products[0].wgmma == below.loop.wgmma"
        )
    },
)
def masked_tiles(
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
    """Computes attention; masks only tiles that the diagonal, a window or the end of the keys crosses."""
    grid, scalar_args, constexpr_args = bound
    _attention[grid](q, k, v, sinks, out, lse, *scalar_args, **constexpr_args)
