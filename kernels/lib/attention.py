"""Device code that attention's Triton kernels share: the range of key tiles, one step of the online softmax, its end.

Online softmax: Milakov and Gimelshein, 2018; Dao, "FlashAttention-2", 2023, whose names these are: m_i is a row's
running maximum, l_i its sum of weights, acc its sum of weighted values.  m_i is in the unit of the exponent (base 2,
scaled), so one multiply-add turns a score into an exponent, and the sums are rescaled by exactly 1 while m_i stays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels import _attention as shared
from rooflab.kernels._attention import capped

LN2: tl.constexpr = tl.constexpr(shared.LN2)
LOG2E: tl.constexpr = tl.constexpr(shared.LOG2E)


@triton.jit
def key_tiles(first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """For queries `first` to `last`: some query sees keys `begin` to `end`, every query sees keys `full` to `whole`.

    `begin` is the first key that query `first` sees; it is not rounded to a tile, so no key before all windows is
    loaded and its value does not matter.  `full` and `whole` are whole tiles after `begin`.
    """
    begin = 0
    full = 0
    end = S
    whole = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(S, last + 1 + S - T), 0)
        all_see = tl.maximum(tl.minimum(S, first + 1 + S - T), 0)
        if WINDOW:
            begin = tl.maximum(first + S - T + 1 - window, 0)
            full = tl.cdiv(tl.maximum(last + S - T + 1 - window - begin, 0), BLOCK_N) * BLOCK_N + begin
            full = tl.minimum(full, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N) * BLOCK_N + begin)
        whole = tl.maximum((all_see - begin) // BLOCK_N * BLOCK_N + begin, full)
    return begin, full, whole, end


@triton.jit
def weigh(
    scores, m_i, l_i, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr = 0,
):  # fmt: skip
    """The weights of the key tile at `start`, the factor that rescales earlier sums, the new m_i and the new l_i.

    scores: (rows, BLOCK_N) products; rows: positions of the queries.  A score times `factor` is its exponent.  With
    `MASKED` the tile may contain keys that a row does not see.  The weight at the maximum is 2**RANGE, the sum's unit.
    """
    if CAP:
        scores = capped(scores * scale, cap)
    elif NEGATED:
        scores = -scores
    if MASKED:
        keys = start + tl.arange(0, BLOCK_N)
        if CAUSAL:
            last = rows + S - T
            seen = keys[None, :] <= tl.minimum(last, S - 1)[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > (last - window)[:, None])
        else:
            seen = (keys < S)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * factor)
    shift = m_new
    if MASKED:
        # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * factor - (shift - RANGE if RANGE else shift)[:, None])
    rescale = tl.exp2(m_i - shift)
    return weights, rescale, m_new, l_i * rescale + tl.sum(weights, 1)


@triton.jit
def step(
    acc, m_i, l_i, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One step over a key tile, loaded by pointers."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    keys64 = keys.to(tl.int64)  # a key times its stride passes 2**31 elements in a long context
    real = dims < HEAD_DIM
    k_ptrs = k_base + keys64[None, :] * k_stride + dims[:, None]
    v_ptrs = v_base + keys64[:, None] * v_stride + dims[None, :]
    if MASKED:
        k = tl.load(k_ptrs, mask=(keys < S)[None, :] & real[:, None], other=0.0)
    elif BLOCK_D > HEAD_DIM:
        k = tl.load(k_ptrs, mask=real[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k, input_precision="ieee")
    weights, rescale, m_i, l_i = weigh(
        scores, m_i, l_i, start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, MASKED,
        BLOCK_N,
    )  # fmt: skip
    if MASKED:
        # V is masked too: memory past the end may hold NaN, and 0 * NaN is NaN.
        v = tl.load(v_ptrs, mask=(keys < S)[:, None] & real[None, :], other=0.0)
    elif BLOCK_D > HEAD_DIM:
        v = tl.load(v_ptrs, mask=real[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, m_i, l_i


@triton.jit
def attend(
    q, k_base, v_base, rows, first, last, S, T, k_stride, v_stride, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The running sums of a tile of queries at positions `rows` (`first` to `last`) over all keys that they see."""
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begin, full, whole, end = key_tiles(first, last, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    if WINDOW:
        for start in range(begin, full, BLOCK_N):
            acc, m_i, l_i = step(
                acc, m_i, l_i, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, window, scale, factor, cap,
                CAUSAL, WINDOW, CAP, NEGATED, True, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    for start in range(full, whole, BLOCK_N):
        acc, m_i, l_i = step(
            acc, m_i, l_i, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, False, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, m_i, l_i = step(
            acc, m_i, l_i, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, True, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    return acc, m_i, l_i


@triton.jit
def finish(acc, m_i, l_i, sinks_ptr, sinks_offset, SINKS: tl.constexpr):
    """The output and the natural log-sum-exp; sinks_offset: one head for all rows, or one head per row."""
    if SINKS:
        sink = tl.load(sinks_ptr + sinks_offset) * LOG2E
        m_new = tl.maximum(m_i, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m_i - shift)
        l_i = l_i * rescale + tl.exp2(sink - shift)
        acc = acc * rescale[:, None]
        m_i = m_new
    some = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(some)) * LN2)
    return acc * (1.0 / some)[:, None], lse
