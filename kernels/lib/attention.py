"""Holds device code for Triton attention kernels: the range of key tiles, the weights of a tile, and the output.

The online softmax is from Milakov and Gimelshein, 2018, and from Dao, "FlashAttention-2", 2023.  The names are Dao's:
m_i is a row's running maximum, l_i the sum of its weights, acc the sum of its weighted values.  The softmax uses powers
of 2, so m_i contains the softmax scale and the factor log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels import _attention

LN2: tl.constexpr = tl.constexpr(_attention.LN2)
LOG2E: tl.constexpr = tl.constexpr(_attention.LOG2E)


@triton.jit
def capped(scores, cap):
    """Returns `cap * tanh(scores / cap)` by the hardware's exponential.  The error is at most `4 * 2**-24 * cap`."""
    return cap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap))))  # 2 log2(e)


@triton.jit
def key_tiles(first, last, T, S, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the bounds of the keys for queries `first` to `last`: `begin`, `unmasked_begin`, `unmasked_end` and
    `end`.

    No query sees a key outside `begin` to `end`.  All queries see all keys between the two unmasked bounds, so tiles
    there need no mask.  `begin` is not rounded to a tile.  So keys that all windows hide are not loaded."""
    begin = 0
    unmasked_begin = 0
    end = S
    unmasked_end = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(S, last + 1 + S - T), 0)
        first_query_end = tl.maximum(tl.minimum(S, first + 1 + S - T), 0)
        if WINDOW:
            begin = tl.maximum(first + S - T + 1 - window, 0)
            unmasked_begin = tl.cdiv(tl.maximum(last + S - T + 1 - window - begin, 0), BLOCK_N) * BLOCK_N + begin
            unmasked_begin = tl.minimum(unmasked_begin, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N) * BLOCK_N + begin)
        unmasked_end = tl.maximum((first_query_end - begin) // BLOCK_N * BLOCK_N + begin, unmasked_begin)
    return begin, unmasked_begin, unmasked_end, end


@triton.jit
def row_offsets(b, h, rows, stride_b, stride_t, stride_h):
    """Returns the int64 offsets of a head's rows.  In a long context, an offset may be larger than 2**31 elements."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + rows.to(tl.int64) * stride_t


@triton.jit
def pages_of(row_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Reads the page numbers of `BLOCK_N` keys, from key `start` on, in a table row.  Keys from `end` on get 0."""
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(row_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def load_tile(ptrs, there, real, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile of keys or values.  With `MASKED`, keys outside the mask `there` become zeros: memory past the end
    may hold NaN, and `0 * NaN` is NaN.  With `PADDED`, columns outside the mask `real` become zeros."""
    if MASKED:
        tile_values = tl.load(ptrs, mask=there & real, other=0.0)
    elif PADDED:
        tile_values = tl.load(ptrs, mask=real, other=0.0)
    else:
        tile_values = tl.load(ptrs)
    return tile_values


@triton.jit
def weigh(
    scores, m_i, l_i, start, rows, S, T, window, scale, factor, cap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, RANGE: tl.constexpr = 0,
):  # fmt: skip
    """Returns the softmax weights of the key tile at `start`, the factor of earlier sums, and the new m_i and l_i.

    m_i is a row's running maximum, and l_i the sum of its weights.  `scores` `[rows, BLOCK_N]` is `q @ k.T`.  `rows`
    holds the positions of the queries.  With `MASKED`, hidden keys get weight 0.  Weights and sums are scaled by
    `2**RANGE`."""
    if CAP:
        scores = capped(scores * scale, cap)
    elif NEGATED:
        scores = -scores
    if MASKED:
        keys = start + tl.arange(0, BLOCK_N)
        if CAUSAL:
            last_key = rows + S - T
            key_mask = keys[None, :] <= tl.minimum(last_key, S - 1)[:, None]
            if WINDOW:
                key_mask = key_mask & (keys[None, :] > (last_key - window)[:, None])
        else:
            key_mask = (keys < S)[None, :]
        scores = tl.where(key_mask, scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * factor)
    exponent_shift = m_new
    if MASKED:
        # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN.
        exponent_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores * factor - (exponent_shift - RANGE if RANGE else exponent_shift)[:, None])
    rescale_factor = tl.exp2(m_i - exponent_shift)
    return weights, rescale_factor, m_new, l_i * rescale_factor + tl.sum(weights, 1)


@triton.jit
def finish(acc, m_i, l_i, sinks_ptr, sinks_offset, out_ptr, out_rows, lse_ptr, lse_rows, there, HEAD_DIM: tl.constexpr):
    """Stores the attention output of the rows in the mask `there`.  If `lse_ptr` is given, also stores their natural
    log-sum-exps.

    `sinks_offset` is the index of the head's sink logit, or one index per row.  `out_rows` and `lse_rows` are int64
    offsets."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + sinks_offset) * LOG2E
        m_new = tl.maximum(m_i, sink)
        exponent_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale_factor = tl.exp2(m_i - exponent_shift)
        l_i = l_i * rescale_factor + tl.exp2(sink - exponent_shift)
        acc = acc * rescale_factor[:, None]
        m_i = m_new
    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    dim_ids = tl.arange(0, acc.shape[1])
    result = (acc * (1.0 / divisor)[:, None]).to(out_ptr.dtype.element_ty)
    store_mask = there[:, None] & (dim_ids < HEAD_DIM)[None, :]
    tl.store(out_ptr + out_rows[:, None] + dim_ids[None, :], result, mask=store_mask)
    if lse_ptr is not None:
        lse = tl.where(l_i == 0.0, float("-inf"), (m_i + tl.log2(divisor)) * LN2)
        tl.store(lse_ptr + lse_rows, lse, mask=there)
