"""Device code of the kernels that load k and v by TMA: one step over a tile of keys, and all of a tile of queries.

In e4m3 the largest weight is 2**8 (RANGE), so that weights reach down to 2**-17 of it; with a largest of 1, to 2**-9.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels.lib.attention import key_tiles, weigh


@triton.jit
def _step(
    acc, m_i, l_i, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, RANGE: tl.constexpr, V_COLUMNS: tl.constexpr, V_FP8: tl.constexpr,
):  # fmt: skip
    """One tile of keys of head `h`; past the keys' end TMA gives zeros, so values need no mask."""
    k = k_map.load([b, h, start, 0]).reshape(BLOCK_N, BLOCK_D)
    scores = tl.dot(q, k.T)
    weights, rescale, m_i, l_i = weigh(
        scores, m_i, l_i, start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, MASKED,
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
    elif RANGE:
        acc = tl.dot(weights.to(tl.float16), v.to(tl.float16), acc)
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return acc, m_i, l_i


@triton.jit
def attend(
    q, k_map, v_map, b, h, rows, first, last, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr = 0, V_COLUMNS: tl.constexpr = False, V_FP8: tl.constexpr = False,
):  # fmt: skip
    """The running sums of a tile of queries at positions `rows` (`first` to `last`) over all keys that they see; those
    of weights and of values are in units of 2**-RANGE."""
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin, full, whole, end = key_tiles(first, last, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    if WINDOW:
        for start in range(begin, full, BLOCK_N):
            acc, m_i, l_i = _step(
                acc, m_i, l_i, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
                CAUSAL, WINDOW, CAP, NEGATED, True, BLOCK_D, BLOCK_N, RANGE, V_COLUMNS, V_FP8,
            )  # fmt: skip
    for start in range(full, whole, BLOCK_N):
        acc, m_i, l_i = _step(
            acc, m_i, l_i, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, False, BLOCK_D, BLOCK_N, RANGE, V_COLUMNS, V_FP8,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, m_i, l_i = _step(
            acc, m_i, l_i, q, k_map, v_map, b, h, start, rows, S, T, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, True, BLOCK_D, BLOCK_N, RANGE, V_COLUMNS, V_FP8,
        )  # fmt: skip
    return acc, m_i, l_i
