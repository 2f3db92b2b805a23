"""What the ping-pong rung computes beside its products: which tile is whose, which keys it sees, and the softmax."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a consumer: what one wgmma has."""


@gluon.jit
def nth_tile(turn, cta, ctas):
    """The tile of a CTA's round `turn`: rounds go to and fro over the CTAs, so that who has the longest tile of one has
    the shortest of the next."""
    return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)


@gluon.jit
def count_tiles(tiles, cta, ctas):
    """How many tiles a CTA has."""
    rounds = tiles // ctas
    position = cta if rounds % 2 == 0 else ctas - 1 - cta
    return rounds + (1 if position < tiles % ctas else 0)


@gluon.jit
def place(tile, tiles_m, heads, section, CAUSAL: gl.constexpr):
    """Rows of a tile, counted in tiles, and its head.  The heads of a section come before the next section's; in the
    last section long tiles come first, in the one before it short ones, so that lengths change slowly throughout."""
    index = tile // (section * tiles_m)
    first = index * section
    size = min(heads - first, section)
    inside = tile - first * tiles_m
    tile_m = inside // size
    if CAUSAL:
        falls = ((heads - 1) // section - index) % 2 == 0
        tile_m = tiles_m - 1 - tile_m if falls else tile_m
    return tile_m, first + inside % size


@gluon.jit
def visible(row, T, S, window, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """The blocks of keys that a tile from `row` on sees: the first, and the one past the last.  There is one at least,
    so that rows that see none pass like others."""
    begin = 0
    end = S
    if CAUSAL:
        end = min(S, row + 2 * ROWS + S - T)
        if window is not None:
            begin = max(row + S - T + 1 - window, 0) // BLOCK_N
    return begin, max(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def kinds(row, T, S, window, begin, end, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Of the blocks after the last one, which comes first: those that the diagonal crosses, and those that every row
    sees whole.  What remains is crossed by the window's far end."""
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
    """cap * tanh(scores * stretch / 2 log2 e), by the hardware's exponential."""
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


@gluon.jit
def softmax(scores, peak, total, scale, MASKED: gl.constexpr):
    """Weights, what becomes of the running peak and sum, and by how much the past shrinks.

    The peak is kept times `scale`: scaled anew at each step, a product that a compiler joins with the subtraction is
    not what was subtracted, and sums whose peak stands still drift by the rounding (3e-4 in 127 steps, a score of 66).
    """
    highest = gl.maximum(peak, gl.max(scores, 1) * scale)
    shift = highest
    if MASKED:  # a row that has seen no key yet has a peak of -inf, and -inf - -inf would be NaN
        shift = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - shift[:, None])
    shrink = gl.exp2(peak - shift)
    return weights, highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Pairs of neighbours in 16 bits, as one register holds them: values of 16 bits would be taken apart and put
    together again where loops meet."""
    rounding: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(rounding, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    weights = gl.join(even, odd).reshape((pairs.shape[0], 2 * pairs.shape[1])).to(dtype, bitcast=True)
    return gl.convert_layout(weights, layout)
