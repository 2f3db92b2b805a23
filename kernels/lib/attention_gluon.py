"""Holds helpers of the Gluon attention kernels: the order of tiles, and the online softmax of a warpgroup's 64 queries.

The names are as in FlashAttention-2 (Dao, 2023).  m_i is a row's running maximum, as an exponent of base 2.  l_i is the
sum of the row's weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rooflab.kernels import _attention
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import Footprint
from rooflab.reference.spec import Arguments

WARPGROUP_ROWS: gl.constexpr = gl.constexpr(64)
"""The number of queries of a consumer warpgroup: the rows of one wgmma."""
LOG2E: gl.constexpr = gl.constexpr(_attention.LOG2E)
LN2: gl.constexpr = gl.constexpr(_attention.LN2)
WARPGROUP_THREADS = 128
"""The threads of a consumer's or of the producer's warpgroup.  setmaxnreg moves registers between warpgroups."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = {2: 240, 3: 160}, 24
"""Registers per thread after setmaxnreg.  A consumer's registers depend on the number of consumers.  The producer's
warpgroup gets the least that setmaxnreg allows."""
ADDRESS_REGISTERS = 24
"""Registers per thread for maximum, sum, descriptors and loop counters, besides accumulator, scores and weights."""

MAX_SECTION_BYTES = 32 * 2**20
"""Bytes of keys and values that L2 is assumed to keep (of its 50 MB), for the order of tiles; not measured."""


def tile_columns(head_dim: int) -> int:
    """Returns the number of columns of a tile.  TMA fills columns past `head_dim` with zeros, and never stores them."""
    return max(64, 1 << (head_dim - 1).bit_length())


def consumer_registers(head_dim: int, block_n: int) -> int:
    """Returns the registers per thread for a consumer's 64 rows: accumulator and scores in fp32, weights in 16 bits."""
    return tile_columns(head_dim) // 2 + block_n // 2 + block_n // 4 + ADDRESS_REGISTERS


def footprint(
    consumers: int, head_dim: int, block_n: int, stages: int, *, rows: int, barriers: int, ctas: int
) -> Footprint:
    """Returns the resources of a CTA.  Shared memory holds `rows` rows of a head, the key and value buffers, and
    barriers.

    `registers` is the average per thread.  If a consumer thread needs more than its limit, `registers` is this need,
    and the CTA does not fit.
    """
    registers = consumer_registers(head_dim, block_n)
    average_registers = (consumers * registers + PRODUCER_REGISTERS) // (consumers + 1)
    return Footprint(
        threads=(consumers + 1) * WARPGROUP_THREADS,
        registers=average_registers if registers <= CONSUMER_REGISTERS[consumers] else registers,
        shared_bytes=(rows + 2 * stages * block_n) * tile_columns(head_dim) * 2 + barriers * BARRIER_BYTES,
        ctas=ctas,
    )


def section_heads(k: torch.Tensor, group: int) -> int:
    """Returns the number of query heads in a section.  The keys and values of all heads of a section fit in L2
    together.  `k` is `[B, S, H_kv, D]`.  `group` is the number of query heads per KV head."""
    head_bytes = 2 * k.shape[1] * k.shape[3] * k.element_size()
    return max(1, MAX_SECTION_BYTES // head_bytes) * group


def exponents(of: Arguments) -> tuple[float, float | None, float | None]:
    """Returns three factors for a softmax that uses powers of 2.  The first factor multiplies a score.  The other two
    are for the soft cap, `cap * tanh(score / cap)`: one is inside of tanh, the other is before tanh.  They are None
    without a soft cap."""
    scale = of.q.shape[-1] ** -0.5 if of.softmax_scale is None else abs(of.softmax_scale)
    scale = LOG2E.value * max(scale, _attention.SMALLEST_SCALE)
    return (1.0, 2 * scale / of.softcap, of.softcap * LOG2E.value) if of.softcap else (scale, None, None)


# The order of tiles is Triton's code, which Gluon's kernels can call: flash_attention/persistent has the same.


@triton.jit
def nth_tile(turn, cta, ctas):
    """Returns the index of a CTA's tile in round `turn`.  Every second round goes over the CTAs in reverse order.  So a
    CTA that has the longest tile of one round has the shortest tile of the next round."""
    return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)


@triton.jit
def count_tiles(tiles, cta, ctas):
    """Returns the number of tiles that the CTA `cta` computes."""
    full_rounds = tiles // ctas
    cta_position = cta if full_rounds % 2 == 0 else ctas - 1 - cta
    return full_rounds + (1 if cta_position < tiles % ctas else 0)


@triton.jit
def place(tile, tiles_m, heads, section, CAUSAL: tl.constexpr):
    """Returns where tile number `tile` is: its place along the queries, and its head.  In a causal call, the last
    section (group of heads) begins with its longest tiles, the section before it with its shortest tiles, and so on.
    So neighbours have similar lengths."""
    section_index = tile // (section * tiles_m)
    first_head = section_index * section
    section_size = min(heads - first_head, section)
    tile_in_section = tile - first_head * tiles_m
    query_tile = tile_in_section // section_size
    if CAUSAL:
        is_longest_first = ((heads - 1) // section - section_index) % 2 == 0
        query_tile = tiles_m - 1 - query_tile if is_longest_first else query_tile
    return query_tile, first_head + tile_in_section % section_size


@gluon.constexpr_function
def product_layout(columns):
    """Returns wgmma's register layout for a result of 64 rows.  Each warp of a warpgroup has 16 rows of all columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def block_kinds(first, last, begin, end, window, BLOCK_N: gl.constexpr):
    """Returns three counts of key blocks: blocks on the diagonal, blocks without a mask, and blocks at the window's
    start.

    The counts include the blocks from `begin` to `end - 2`.  The first query sees keys up to `first`, the last query up
    to `last`."""
    unmasked_end = gl.minimum(gl.maximum(gl.maximum(first + 1, 0) // BLOCK_N, begin), end - 1)
    unmasked_begin = begin
    if window is not None:
        unmasked_begin = gl.cdiv(gl.maximum(last + 1 - window, 0), BLOCK_N)
        unmasked_begin = gl.minimum(gl.maximum(unmasked_begin, begin), unmasked_end)
    return end - 1 - unmasked_end, unmasked_end - unmasked_begin, unmasked_begin - begin


@gluon.jit
def softmax(scores, m_i, l_i, scales, last, end, window, MASKED: gl.constexpr):
    """Returns the softmax weights of a block of scores, the new m_i and l_i, and the factor that rescales earlier sums.

    m_i is a row's running maximum, and l_i the sum of its weights.  With `MASKED`, a row sees no key after column
    `last` or `end`, and only the last `window` keys up to `last`.

    m_i is the maximum of scaled scores.  If an unscaled maximum were scaled in each step, rounding would change the
    sums: by 3e-4 after 127 blocks, if all scores are 66."""
    scale, tanh_scale, cap = scales
    if cap is not None:  # cap * tanh(scores * stretch / (2 log2 e)) with the hardware's exponential
        scores = cap * (1 - 2 / (1 + gl.exp2(scores * tanh_scale)))
    if MASKED:
        keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))[None, :]
        key_mask = keys <= (end if last is None else last if end is None else gl.minimum(last, end))
        if last is not None and window is not None:
            key_mask = key_mask & (keys > last - window)
        scores = gl.where(key_mask, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    exponent_shift = m_new
    if MASKED:  # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN
        exponent_shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    weights = gl.exp2(scores * scale - exponent_shift[:, None])
    rescale_factor = gl.exp2(m_i - exponent_shift)
    return weights, m_new, l_i * rescale_factor + gl.sum(weights, 1), rescale_factor


@gluon.jit
def rescaled(accumulator, shrink):
    """Returns the accumulator with each row multiplied by its factor `shrink`."""
    return accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, accumulator.type.layout))[:, None]


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Converts fp32 weights to 16 bits and packs two neighbours in a register.  Without this, the compiler would unpack
    the weights at the end of one loop, and pack them again in the next loop."""
    cvt_asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even_exps, odd_exps = weights.reshape((weights.shape[0], weights.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(cvt_asm, "=r,f,f", [even_exps, odd_exps], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_factor(weights, dtype: gl.constexpr, product):
    """Converts attention weights to the left operand of a matmul.  The weights are fp32, or pairs of 16-bit values in
    int32.  `product` is the tensor that the matmul adds to; Triton 3.6.0 cannot pass its layout to a function."""
    if weights.dtype == gl.int32:
        even_exps, odd_exps = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [weights], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        operand = gl.join(even_exps, odd_exps).reshape((weights.shape[0], 2 * weights.shape[1])).to(dtype, bitcast=True)
    else:
        operand = weights.to(dtype)
    return gl.convert_layout(operand, gl.DotOperandLayout(0, product.type.layout, 2))


@gluon.jit
def finished(m_i, l_i, sink):
    """Returns the factor that turns the accumulator into the result, and the natural log-sum-exp.

    `sink` is the score of an attention sink (a weight without a value), or None.
    """
    rescale_factor = gl.full(m_i.shape, 1.0, gl.float32, m_i.type.layout)
    if sink is not None:
        sink *= LOG2E
        m_new = gl.maximum(m_i, sink)
        # Without keys and with a sink of -inf, -inf - -inf would be NaN.
        exponent_shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        rescale_factor = gl.exp2(m_i - exponent_shift)
        l_i = l_i * rescale_factor + gl.exp2(sink - exponent_shift)
        m_i = m_new
    divisor = gl.where(l_i == 0.0, 1.0, l_i)
    lse = gl.where(l_i == 0.0, float("-inf"), (m_i + gl.log2(divisor)) * LN2)
    return rescale_factor / divisor, lse
