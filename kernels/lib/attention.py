"""Device code that attention's Triton kernels share: it computes the range of key tiles, the weights, and the result.

Online softmax: Milakov and Gimelshein, 2018; Dao, "FlashAttention-2", 2023, with the same names: m_i is a row's running
maximum, l_i the row's sum of weights, acc the row's sum of weighted values.  m_i has the unit of the exponent (base 2,
scaled), so one multiply-add turns a score into an exponent, and the sums are rescaled by exactly 1 while m_i stays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels import _attention

LN2: tl.constexpr = tl.constexpr(_attention.LN2)
LOG2E: tl.constexpr = tl.constexpr(_attention.LOG2E)


@triton.jit
def capped(scores, cap):
    """Returns cap * tanh(scores / cap) by the hardware's exponential, with an error of at most 4 * 2**-24 of cap."""
    return cap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap))))  # 2 log2(e)


@triton.jit
def key_tiles(first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns begin, full, whole and end, the bounds of three ranges of keys for the queries `first` to `last`.

    `begin` is the first key that query `first` sees.  It is not rounded to a tile, so no key before all windows is
    loaded. `full` and `whole` are whole tiles after `begin`.  From `begin` to `full` a window cuts the keys.  From
    `full` to `whole` every query sees every key, so no mask is needed.  From `whole` to `end` the diagonal or the end
    of the keys cuts.
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
def row_offsets(b, h, rows, stride_b, stride_t, stride_h):
    """Returns the offsets of the rows of a head; int64, because offsets exceed 2**31 elements in long contexts."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + rows.to(tl.int64) * stride_t


@triton.jit
def pages_of(row_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Reads the pages of the keys from `start` on, from a row of a block table.  It reads no entries past `end`."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(row_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def load_tile(ptrs, there, real, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile of keys or values.  With `MASKED`, keys outside `there` become 0, because memory past the end may
    hold NaN, and 0 * NaN is NaN.  With `PADDED`, columns outside `real` become 0."""
    if MASKED:
        tile = tl.load(ptrs, mask=there & real, other=0.0)
    elif PADDED:
        tile = tl.load(ptrs, mask=real, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def weigh(
    scores, m_i, l_i, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr = 0,
):  # fmt: skip
    """Returns the weights of the key tile at `start`, the factor that rescales earlier sums, and the new m_i and l_i.

    scores: (rows, BLOCK_N) products; rows: positions of the queries.  A score times `factor` is its exponent.  With
    `MASKED` the tile may contain keys that a row does not see.  The weight at the maximum is 2**RANGE.
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
def finish(acc, m_i, l_i, sinks_ptr, sinks_offset, out_ptr, out_rows, lse_ptr, lse_rows, there, HEAD_DIM: tl.constexpr):
    """Stores the rows of the mask `there`: the output, and if `lse_ptr` is not None, the natural log-sum-exp.

    sinks_offset: one head for all rows, or one head per row.  out_rows, lse_rows: the offset of each row, int64.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + sinks_offset) * LOG2E
        m_new = tl.maximum(m_i, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2(m_i - shift)
        l_i = l_i * rescale + tl.exp2(sink - shift)
        acc = acc * rescale[:, None]
        m_i = m_new
    some = tl.where(l_i == 0.0, 1.0, l_i)
    dims = tl.arange(0, acc.shape[1])
    result = (acc * (1.0 / some)[:, None]).to(out_ptr.dtype.element_ty)
    mask = there[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], result, mask=mask)
    if lse_ptr is not None:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(some)) * LN2)
        tl.store(lse_ptr + lse_rows, lse, mask=there)
