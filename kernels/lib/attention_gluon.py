"""Device code that attention's Gluon kernels share: the online softmax of one warpgroup, which has 64 rows of queries.

Names as in FlashAttention-2 (Dao, 2023): m_i is a row's running maximum, l_i its sum of weights.  m_i is in the unit of
the exponent (base 2, scaled), so one multiply-add turns a score into an exponent.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooflab.kernels import _attention
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import Footprint

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a consumer: the rows of one wgmma."""
LAZY_LOG2: gl.constexpr = gl.constexpr(8.0)
"""A lazy m_i stays until a score is 2**8 times as heavy: weights are at most 256, and sums far from fp32's limit."""
LOG2E: gl.constexpr = gl.constexpr(_attention.LOG2E)
LN2: gl.constexpr = gl.constexpr(_attention.LN2)
WARPGROUP = 128
"""Threads of a consumer, and of the producer warp's warpgroup: setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = {2: 240, 3: 160}, 24
"""Registers per thread after setmaxnreg: of a consumer, by the number of consumers; of the producer's warpgroup, which
gets the least that setmaxnreg allows."""
ADDRESS_REGISTERS = 24
"""For peak, sum, descriptors and loop counters, in addition to accumulator, scores and weights."""


def tile_columns(head_dim: int) -> int:
    """Columns of a tile: TMA fills those past head_dim with zeros, and does not store them."""
    return max(64, 1 << (head_dim - 1).bit_length())


def consumer_registers(head_dim: int, block_n: int) -> int:
    """fp32 accumulator and scores and 16-bit weights, for 64 rows on 128 threads."""
    return tile_columns(head_dim) // 2 + block_n // 2 + block_n // 4 + ADDRESS_REGISTERS


def footprint(
    consumers: int, head_dim: int, block_n: int, stages: int, *, rows: int, barriers: int, ctas: int
) -> Footprint:
    """Average registers of the threads, or, where a consumer holds more than it may have, that number, which no CTA
    has; in shared memory both rings, `rows` more rows of a head, and barriers.

    Causal programs differ in their work, so `tensor_flops` is 0.
    """
    held = consumer_registers(head_dim, block_n)
    average = (consumers * held + PRODUCER_REGISTERS) // (consumers + 1)
    return Footprint(
        threads=(consumers + 1) * WARPGROUP,
        registers=average if held <= CONSUMER_REGISTERS[consumers] else held,
        shared_bytes=(rows + 2 * stages * block_n) * tile_columns(head_dim) * 2 + barriers * BARRIER_BYTES,
        ctas=ctas,
    )


def exponents(scale: float, softcap: float | None) -> tuple[float, float | None, float | None]:
    """The `scales` of `softmax`, which turn a score into an exponent: its scale, and for a soft cap two more."""
    scale = LOG2E.value * max(scale, _attention.SMALLEST_SCALE)
    return (1.0, 2 * scale / softcap, softcap * LOG2E.value) if softcap else (scale, None, None)


@gluon.constexpr_function
def product_layout(columns):
    """How wgmma lays a product of 64 rows over the registers of a warpgroup: 16 rows of all columns a warp."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def block_kinds(first, last, begin, end, window, BLOCK_N: gl.constexpr):
    """Counts the blocks from `begin` to `end`, without the last one: those that the diagonal cuts, those without a
    mask, and those that the far end of the window cuts.  The first row sees keys up to `first`, the last one up to
    `last`."""
    whole = gl.minimum(gl.maximum(gl.maximum(first + 1, 0) // BLOCK_N, begin), end - 1)
    in_window = begin
    if window is not None:
        in_window = gl.cdiv(gl.maximum(last + 1 - window, 0), BLOCK_N)
        in_window = gl.minimum(gl.maximum(in_window, begin), whole)
    return end - 1 - whole, whole - in_window, in_window - begin


@gluon.jit
def softmax(scores, m_i, l_i, scales, last, end, window, MASKED: gl.constexpr, LAZY: gl.constexpr):
    """Of a block of scores: weights, new m_i and l_i, and the factor that rescales earlier sums, with LAZY mostly 1.

    With MASKED a row sees the `window` keys (None: all) up to its `last`, a column of numbers, and up to `end`; both
    count from the block's first key, and either may be None.

    m_i is kept multiplied by `scale`.  If each step multiplied again, the compiler would fuse that product with
    the subtraction and round differently, so sums with a constant m_i would drift (by 3e-4 after 127 blocks of scores
    of 66).
    """
    scale, stretch, cap = scales
    if cap is not None:  # cap * tanh(scores * stretch / (2 log2 e)) with the hardware's exponential
        scores = cap * (1 - 2 / (1 + gl.exp2(scores * stretch)))
    if MASKED:
        keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
        seen = keys <= (end if last is None else last if end is None else gl.minimum(last, end))
        if last is not None and window is not None:
            seen = seen & (keys > last - window)
        scores = gl.where(seen, scores, float("-inf"))
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
def as_factor(weights, dtype: gl.constexpr, product: gl.constexpr):
    """Weights in 16 bits, in registers, as the left factor of a `product` with values; from pairs or from fp32."""
    if weights.dtype == gl.int32:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        factors = gl.join(even, odd).reshape((weights.shape[0], 2 * weights.shape[1])).to(dtype, bitcast=True)
    else:
        factors = weights.to(dtype)
    return gl.convert_layout(factors, gl.DotOperandLayout(0, product, 2))


@gluon.jit
def finished(m_i, l_i, sink):
    """The factor that makes the accumulator the result, and the natural log-sum-exp.

    sink: the score of a weight without a value, or None.
    """
    rescale = gl.full(m_i.shape, 1.0, gl.float32, m_i.type.layout)
    if sink is not None:
        sink *= LOG2E
        highest = gl.maximum(m_i, sink)
        # Without keys and with a sink of -inf, -inf - -inf would be NaN.
        shift = gl.where(highest == float("-inf"), 0.0, highest)
        rescale = gl.exp2(m_i - shift)
        l_i = l_i * rescale + gl.exp2(sink - shift)
        m_i = highest
    some = gl.where(l_i == 0.0, 1.0, l_i)
    lse = gl.where(l_i == 0.0, float("-inf"), (m_i + gl.log2(some)) * LN2)
    return rescale / some, lse
