"""Implements the kernel `fp8`, the version after `tma`: queries, keys and values in e4m3, with one scale per head, on
fp8 tensor cores.

The scales of q and k multiply the softmax scale. The scale of v multiplies the result. The smallest e4m3 value is
2**-9. So the kernel multiplies softmax weights by 2**8 before it rounds them to e4m3, and weights down to 2**-17 do not
become 0. The softmax sum has the same factor, so the result does not change. The fp8 accumulator keeps only 14 bits. So
fp32 registers add up the products of weights and values, tile by tile (see gemm_fp8/promoted.py).

Ideas that were tried, predicted or not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import SMALLEST_SCALE, nothing_seen, options, strides_of, traffic
from rooflab.kernels._attention_configs import ADDRESS_REGISTERS, Config, padded
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._by_tma import COLUMNS, ROW_ORDER, query_tiles, tensor_map
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish, key_tiles, row_offsets, weigh
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.flash_attention import E4M3, keys_contiguous
from rooflab.reference.spec import Arguments, Case, Scheme

WIDEST_FP8_HEAD = 128
"""The widest head_dim for which registers hold a tile's products and the sums together (read in the SASS)."""
DEFAULTS = Defaults(
    (
        # One warpgroup of 64 rows: two or three CTAs fit on an SM, and the exponentials of one run under the products
        # of another.  128 rows would read half the bytes from L2, but only one CTA would fit, whose steps wait for each
        # other.
        ({"D": 128}, Config(64, 128, 4, 2)),
        ({}, Config(64, 64, 4, 2)),
    )
)


def values_in_fp8(columns: bool, head_dim: int) -> bool:
    """Returns whether the product of softmax weights and values is in e4m3.  Otherwise it is in fp16."""
    return columns and padded(head_dim) <= WIDEST_FP8_HEAD


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns the configs to try, with 2 to 4 pipeline stages. A warpgroup (four warps) has 64 rows of queries, or 128
    for some small head_dims. Above a head_dim of 128, a tile has 64 keys, because more would spill registers (read in
    the SASS)."""
    padded_dim = padded(int(case["D"]))
    row_warp_pairs = [(64, 4), (128, 8), *([(128, 4)] if padded_dim <= 64 else [])]
    key_counts = (64, 128, 256) if padded_dim <= WIDEST_FP8_HEAD else (64,)
    return tuple(Config(m, n, warps, stages) for m, warps in row_warp_pairs for n in key_counts for stages in (2, 3, 4))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources. Shared memory holds the queries, and the keys and values of all pipeline stages.

    With values in e4m3, registers hold the output sums and one more tile. With values in fp16, registers hold the
    output sums, the scores and the softmax weights. Shared memory then also holds a tile of values in fp16."""
    D = padded(int(case["D"]))
    has_fp8_values = values_in_fp8(bool(case.get("v_columns")), D)
    register_columns = D + (max(D, config.block_n) if has_fp8_values else config.block_n + config.block_n // 2)
    smem_rows = config.block_m + (2 * config.num_stages + (not has_fp8_values)) * config.block_n
    return Footprint(
        threads=32 * config.num_warps,
        registers=config.block_m * register_columns // (32 * config.num_warps) + ADDRESS_REGISTERS,
        shared_bytes=smem_rows * D,
        ctas=query_tiles(config, case),
    )


MAX_WEIGHT_EXPONENT: tl.constexpr = tl.constexpr(8)
"""The exponent of the largest weight: weights reach down to 2**-17 of the largest, instead of 2**-9 with exponent 0."""
WEIGHT_SCALE: tl.constexpr = tl.constexpr(2.0**-8)
MIN_SCORE_FACTOR: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def scale_of(scale_ptr, b, h, stride_b, stride_h):
    """Returns the scale of head `h` in sequence `b`, or 1 if `scale_ptr` is None."""
    head_scale = 1.0
    if scale_ptr is not None:
        head_scale = tl.load(scale_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h)
    return head_scale


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, T, S, H, group, window,
    scale, factor, cap, q_scale_stride_b, q_scale_stride_h, k_scale_stride_b, k_scale_stride_h, v_scale_stride_b,
    v_scale_stride_h, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_FP8: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // row_tiles // H
    h = tl.program_id(0) // row_tiles % H
    # A head's last rows first: under a causal mask they take longest, and the grid should end with short tiles.
    first_row = (row_tiles - 1 - tl.program_id(0) % row_tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    qk_scale = scale_of(q_scale_ptr, b, h, q_scale_stride_b, q_scale_stride_h) * scale_of(
        k_scale_ptr, b, h // group, k_scale_stride_b, k_scale_stride_h
    )
    if CAP:
        scale *= qk_scale
    else:
        factor = tl.maximum(factor * qk_scale, MIN_SCORE_FACTOR)
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    h_kv = h // group
    last_row = tl.minimum(first_row + BLOCK_M, T) - 1
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    key_bounds = key_tiles(first_row, last_row, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    for range_index in tl.static_range(0 if WINDOW else 1, 3):  # the middle one of three ranges of keys needs no mask
        for k_start in range(key_bounds[range_index], key_bounds[range_index + 1], BLOCK_N):
            k = k_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
            scores = tl.dot(q, k.T)
            weights, rescale_factor, m_i, l_i = weigh(
                scores, m_i, l_i, k_start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED,
                range_index != 1, BLOCK_N, MAX_WEIGHT_EXPONENT,
            )  # fmt: skip
            # Past the keys' end TMA gives zeros, so values need no mask.
            if V_COLUMNS:
                v = v_map.load([b, h_kv, 0, k_start]).reshape(BLOCK_D, BLOCK_N).T
            else:
                v = v_map.load([b, h_kv, k_start, 0]).reshape(BLOCK_N, BLOCK_D)
            acc *= rescale_factor[:, None]
            if V_FP8:
                # A new sum per tile: the tensor cores' accumulator keeps 14 bits, and a sum over all keys would lose
                # more.
                acc += tl.dot(weights.to(v.dtype), v)
            else:
                acc = tl.dot(weights.to(tl.float16), v.to(tl.float16), acc)
    v_scale = scale_of(v_scale_ptr, b, h_kv, v_scale_stride_b, v_scale_stride_h)
    out_rows = row_offsets(b, h, rows, out_stride_b, out_stride_t, out_stride_h)
    lse_rows = row_offsets(b, h, rows, lse_stride_b, lse_stride_t, lse_stride_h)
    acc *= v_scale * WEIGHT_SCALE
    l_i *= WEIGHT_SCALE
    finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, out_ptr, out_rows, lse_ptr, lse_rows, rows < T, HEAD_DIM)


def bind(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options, such as the memory order and dtype of `v`."""
    (B, T, H, D), (_, S, H_kv, _), config = of.q.shape, of.k.shape, of.config
    has_v_columns = keys_contiguous(of.v)
    v_map = tensor_map(of.v, config.block_n, COLUMNS if has_v_columns else ROW_ORDER)
    maps = tensor_map(of.q, config.block_m), tensor_map(of.k, config.block_n), v_map
    scalars, strides, constants = options(of, S)
    scale_strides = *strides_of(of.q_scale, 2), *strides_of(of.k_scale, 2), *strides_of(of.v_scale, 2)
    constants |= {"V_COLUMNS": has_v_columns, "V_FP8": values_in_fp8(has_v_columns, D)}
    return (cdiv(T, config.block_m) * B * H,), maps, (T, S, H, H // H_kv, *scalars, *scale_strides, *strides), constants


@kernel(
    backend="triton",
    min_sm=90,
    dtypes={"q": (E4M3,)},
    limits={"D": range(32, 257, 16)},
    mapped={"q": -1, "k": -1, "v": (1, -1)},
    traffic=traffic,
    tuning=Tuning(Config, configs, DEFAULTS, footprint),
    bind=bind,
    empty=nothing_seen,
    over="tma",
    shows={
        "B=1,T=2048,S=2048,H=32,H_kv=8,D=128,causal=true,v_columns=true "
        "in fp8_e4m3 with block_m=64,block_n=128,num_warps=4,num_stages=2": (
            r"(products[0].wgmma, products[0].tma, products[0].shared_store, products[0].shared_load) == (8, 2, 0, 0); "
            r"all(loop.spill_load + loop.spill_store == 0 for loop in products); "
            r'in_sass(r"QGMMA\.\S+ R\d+, R\d+, gdesc\[UR\d+\], RZ") == 2'
        ),
        "B=1,T=2048,S=2048,H=32,H_kv=8,D=128,causal=true "
        "in fp8_e4m3 with block_m=64,block_n=128,num_warps=4,num_stages=2": (
            "products[0].wgmma == 12 and products[0].tma == 2 and products[0].shared_store > 0"
        ),
    },
)
def fp8(
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
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    return_lse: bool,
    config: Config,
    bound: Any,
) -> None:
    """Computes attention with scores in e4m3.  The product with `v` is in e4m3 or in fp16 (see `values_in_fp8`)."""
    grid, (q_map, k_map, v_map), scalars, constexprs = bound
    _attention[grid](q_map(q), k_map(k), v_map(v), sinks, q_scale, k_scale, v_scale, out, lse, *scalars, **constexprs)
