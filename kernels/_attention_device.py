"""Device code that attention's Triton rungs share: which tiles of keys some query sees and which all see, one tile's
step of the online softmax (Milakov and Gimelshein, 2018; Dao, "FlashAttention-2", 2023), and its end.

The running peak is kept in the exponent's own unit, base 2 and scaled, so that a score enters by one multiply-add, and
a peak that did not move shrinks the sums by exactly 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflab.kernels import _attention as shared
from rooflab.kernels._attention import capped

LN2: tl.constexpr = tl.constexpr(shared.LN2)
LOG2E: tl.constexpr = tl.constexpr(shared.LOG2E)
SMALLEST_FACTOR = 2.0**-100
"""In place of a scale of 0, which would make NaN of a masked score: every weight is 1 all the same."""


def softmax_numbers(
    q: torch.Tensor, softmax_scale: float | None, softcap: float | None
) -> tuple[float, float, float, bool]:
    """`scale`, `factor`, `cap` and `NEGATED` of the device's `weigh`: the factor is never negative."""
    scale = shared.get_scale(q, softmax_scale)
    if softcap is not None:
        return scale, shared.LOG2E, float(softcap), False
    return scale, max(abs(scale), SMALLEST_FACTOR) * shared.LOG2E, 0.0, scale < 0


@triton.jit
def key_tiles(first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of queries `first` to `last`: keys from `begin` to `end` are seen by some, those from `full` to `whole` by all.

    `full` and `whole` are whole tiles from `begin`.  That is the first key of `first` itself, no multiple of a tile: a
    key before every window is never loaded, so its value may be anything.
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
    scores, peak, total, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr = 0,
):  # fmt: skip
    """Weights of the tile of keys from `start` on, by how much the past shrinks, and the new peak and sum.

    scores: (rows, BLOCK_N) products; rows: positions of the queries; a score times `factor`, not negative, is the
    exponent.  With `MASKED` the tile may reach past what a row sees.  The peak weighs 2**RANGE, the sum's unit.
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
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    shift = new_peak
    if MASKED:
        # A row that has seen no key yet has a peak of -inf; -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * factor - (shift - RANGE if RANGE else shift)[:, None])
    rescale = tl.exp2(peak - shift)
    return weights, rescale, new_peak, total * rescale + tl.sum(weights, 1)


@triton.jit
def step(
    acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of keys, by pointers to the rows of a head."""
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
    weights, rescale, peak, total = weigh(
        scores, peak, total, start, rows, S, T, window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, MASKED,
        BLOCK_N,
    )  # fmt: skip
    if MASKED:
        # Masked as well as the scores: what lies past the end may be NaN, and 0 * NaN is NaN.
        v = tl.load(v_ptrs, mask=(keys < S)[:, None] & real[None, :], other=0.0)
    elif BLOCK_D > HEAD_DIM:
        v = tl.load(v_ptrs, mask=real[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, peak, total


@triton.jit
def finish(acc, peak, total, sinks_ptr, sinks_offset, SINKS: tl.constexpr):
    """The output, and the natural log-sum-exp; sinks_offset: of the head of all rows, or of each row's."""
    if SINKS:
        sink = tl.load(sinks_ptr + sinks_offset) * LOG2E
        new_peak = tl.maximum(peak, sink)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.exp2(sink - shift)
        acc = acc * rescale[:, None]
        peak = new_peak
    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(some)) * LN2)
    return acc * (1.0 / some)[:, None], lse
