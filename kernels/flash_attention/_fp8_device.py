"""Device code of flash_attention/fp8: one step over a tile of keys in e4m3, and all steps of a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels._attention_device import SMALLEST_FACTOR as _SMALLEST_FACTOR
from rooflab.kernels._attention_device import key_tiles, weigh

RANGE: tl.constexpr = tl.constexpr(8)
"""The largest weight is 2**8: e4m3 (up to 448) then reaches down to 2**-17 of it; with a largest of 1, to 2**-9."""
UNIT: tl.constexpr = tl.constexpr(2.0**-8)
SMALLEST_FACTOR: tl.constexpr = tl.constexpr(_SMALLEST_FACTOR)


@triton.jit
def scale_of(scale_ptr, b, h, stride_b, stride_h):
    """A head's scale; 1 if `scale_ptr` is None."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h)
    return scale


@triton.jit
def _step(
    acc, peak, total, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    V_COLUMNS: tl.constexpr, V_FP8: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of keys of head `h`; past the keys' end TMA gives zeros, so values need no mask."""
    k = k_map.load([b, h, start, 0]).reshape(BLOCK_N, BLOCK_D)
    scores = tl.dot(q, k.T)
    weights, rescale, peak, total = weigh(
        scores, peak, total, start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, MASKED,
        BLOCK_N, RANGE,
    )  # fmt: skip
    if V_COLUMNS:
        v = v_map.load([b, h, 0, start]).reshape(BLOCK_D, BLOCK_N).T
    else:
        v = v_map.load([b, h, start, 0]).reshape(BLOCK_N, BLOCK_D)
    acc *= rescale[:, None]
    if V_FP8:
        # A new sum per tile: the tensor cores' accumulator keeps 14 bits, and a sum over all keys would lose more.
        acc += tl.dot(weights.to(v.dtype), v)
    else:
        acc = tl.dot(weights.to(tl.float16), v.to(tl.float16), acc)
    return acc, peak, total


@triton.jit
def attend(
    q, k_map, v_map, b, h, rows, first, last, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_FP8: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The running sums of a tile of queries at positions `rows` (`first` to `last`) over all keys that they see.

    The sums of weights and of values are in units of 2**-RANGE.
    """
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin, full, whole, end = key_tiles(first, last, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    if WINDOW:
        for start in range(begin, full, BLOCK_N):
            acc, peak, total = _step(
                acc, peak, total, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
                CAUSAL, WINDOW, CAP, NEGATED, True, V_COLUMNS, V_FP8, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    for start in range(full, whole, BLOCK_N):
        acc, peak, total = _step(
            acc, peak, total, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, False, V_COLUMNS, V_FP8, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, peak, total = _step(
            acc, peak, total, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, True, V_COLUMNS, V_FP8, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    return acc, peak, total
