"""What ping_pong computes in addition to its products: which keys a tile sees, and the softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a consumer: the rows of one wgmma."""


@gluon.jit
def visible(row, T, S, window, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The first block of keys that a tile at `row` sees, and one past the last; at least one block, so rows that see no
    key need no special case."""
    begin = 0
    end = S
    if CAUSAL:
        end = min(S, row + CONSUMERS * ROWS + S - T)
        if window is not None:
            begin = max(row + S - T + 1 - window, 0) // BLOCK_N
    return begin, max(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def kinds(row, T, S, window, begin, end, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the blocks before the last one: the number that the diagonal crosses, and the number that every row sees in
    full.  The far end of the window crosses the others."""
    steps = end - 1 - begin
    if CAUSAL:
        whole = min(end - 1, max(row + S - T + 1, 0) // BLOCK_N)
        crossed = min(end - 1 - whole, steps)
        if window is not None:
            far = gl.cdiv(max(row + ROWS + S - T - window, 0), BLOCK_N)
            return crossed, max(whole - max(far, begin), 0)
        return crossed, whole
    return 0, steps


@gluon.jit
def capped(scores, stretch, cap):
    """cap * tanh(scores * stretch / (2 log2 e)) with the hardware's exponential."""
    return cap * (1 - 2 / (1 + gl.exp2(scores * stretch)))


@gluon.jit
def masked(scores, first, row, T, S, window, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    layout: gl.constexpr = scores.type.layout
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if CAUSAL:
        last = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout)) + S - T - first
        seen = keys[None, :] <= gl.minimum(last, S - 1 - first)[:, None]
        if window is not None:
            seen = seen & (keys[None, :] > (last - window)[:, None])
    else:
        seen = (keys < S - first)[None, :]
    return gl.where(seen, scores, float("-inf"))


LAZY_LOG2: gl.constexpr = gl.constexpr(8.0)
"""A lazy m_i stays until a score is 2**8 times as heavy: weights are at most 256, and sums far from fp32's limit."""


@gluon.jit
def softmax(scores, m_i, l_i, scale, MASKED: gl.constexpr, LAZY: gl.constexpr):
    """Weights, new m_i and l_i, and the factor that rescales earlier sums, with LAZY mostly 1.

    m_i is kept multiplied by `scale`.  If each step multiplied again, the compiler would fuse that product with
    the subtraction and round differently, so sums with a constant m_i would drift (3e-4 in 127 steps, a score of 66).
    """
    highest = gl.maximum(m_i, gl.max(scores, 1) * scale)
    if LAZY:
        highest = gl.where(highest > m_i + LAZY_LOG2, highest, m_i)
    shift = highest
    if MASKED:  # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN
        shift = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - shift[:, None])
    shrink = gl.exp2(m_i - shift)
    return weights, highest, l_i * shrink + gl.sum(weights, 1), shrink


@gluon.constexpr_function
def _unless_one(count):
    """PTX that multiplies `count` registers unless a warp's factors, two in turn for pairs, are all 1; its operands."""
    vote = f"setp.neu.f32 p, ${2 * count}, 0f3F800000; @!p setp.neu.f32 p, ${2 * count + 2}, 0f3F800000;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    text = f"{{ .reg .pred p; {vote} vote.sync.any.pred p, p, -1; @!p bra same; {products} same: }}"
    return text, ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(accumulator, shrink, LAZY: gl.constexpr):
    """The accumulator times its rows' factors; with LAZY a warp skips the products if all its factors are 1."""
    factors = gl.convert_layout(shrink, gl.SliceLayout(1, accumulator.type.layout))[:, None]
    if LAZY:
        count: gl.constexpr = accumulator.shape[0] * accumulator.shape[1] // 128
        code: gl.constexpr = _unless_one(count)
        _, factors = gl.broadcast(accumulator, factors)
        accumulator = gl.inline_asm_elementwise(
            code[0], code[1], [accumulator, factors], dtype=gl.float32, is_pure=True, pack=count
        )
    else:
        accumulator *= factors
    return accumulator


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Pairs of neighbours in 16 bits, two per register; the compiler would separate and join single 16-bit values again
    between loops."""
    rounding: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(rounding, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(weights, dtype: gl.constexpr, layout: gl.constexpr):
    """Weights in 16 bits, as a factor of the value product, from pairs or from fp32."""
    if weights.dtype == gl.int32:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        factors = gl.join(even, odd).reshape((weights.shape[0], 2 * weights.shape[1])).to(dtype, bitcast=True)
    else:
        factors = weights.to(dtype)
    return gl.convert_layout(factors, layout)
