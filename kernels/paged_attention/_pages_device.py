"""Device code of `tma_pages`: a producer warp that loads pages, and two consumer warpgroups of 64 rows each.

Keys and values have a ring of slots each.  A slot is `full` when its bytes have arrived, and `empty` when both
consumers' products of it are done.  A slot is a block of keys, made of boxes with rows of one page each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rooflab.kernels._attention import LN2 as _LN2
from rooflab.kernels._attention import LOG2E as _LOG2E
from rooflab.kernels._attention import capped
from rooflab.kernels._gluon import async_load, reinterpret

LN2: gl.constexpr = gl.constexpr(_LN2)
LOG2E: gl.constexpr = gl.constexpr(_LOG2E)
ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), phase ^ last.to(gl.int32)


@gluon.jit
def _bound(cu, b):
    return gl.load(cu + b) if cu is not None else b


@gluon.jit
def _place(turn, cu, lens, B, H_kv, tiles, window, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """The tile of this CTA's round `turn`: KV head, sequence, first query, number of queries, first row, length, the
    blocks of keys from `low` to `high` that some row sees, and the first key that some row sees.  The tiles that see
    the most keys come first."""
    number = turn * gl.num_programs(0) + gl.program_id(0)
    tile = tiles - 1 - number // H_kv
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        behind = _bound(cu, middle) * GROUP // (2 * ROWS) + middle > tile
        high = gl.where(behind, middle, high)
        low = gl.where(behind, low, middle)
    b = low
    first_query = _bound(cu, b)
    queries = _bound(cu, b + 1) - first_query
    row = (tile - first_query * GROUP // (2 * ROWS) - b) * (2 * ROWS)
    length = gl.load(lens + b)
    last_query = gl.minimum((row + 2 * ROWS - 1) // GROUP, queries - 1)
    end = gl.maximum(length - queries + last_query + 1, 0)
    end = gl.where(row < queries * GROUP, end, 0)
    begin = 0
    if WINDOW:
        begin = gl.maximum(length - queries + row // GROUP + 1 - window, 0)
    high = gl.cdiv(end, BLOCK_N)
    return number % H_kv, b, first_query, queries, row, length, gl.minimum(begin // BLOCK_N, high), high, begin


@gluon.constexpr_function
def tile_layout(rows, columns, copies):
    """A slot in wgmma's swizzled atoms of 8 rows and 64 columns.  If one copy takes all columns of a box, those of 8
    rows lie before the next 8 rows; if it takes 64, all rows lie before the next 64 columns."""
    atom = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    across = [[0, column] for column in (64, 128) if column < columns]
    down = [[row, 0] for row in (8, 16, 32, 64, 128) if row < rows]
    return gl.SharedLinearLayout(atom + (across + down if copies == 1 else down + across), [], 1024)


@gluon.jit
def _tile(ring, slot, BLOCK_N: gl.constexpr, D: gl.constexpr, COPIES: gl.constexpr):
    return reinterpret(ring.index(slot), ring.dtype, [BLOCK_N, D], tile_layout(BLOCK_N, D, COPIES))


@gluon.jit
def _pages(table, start, begin, length, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr):
    """The page numbers of the boxes of a block, one in each lane.  -1 past the end of the sequence and before all
    windows, where pages may have been freed."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    key = start + lane * BOX
    there = (lane < BLOCK_N // BOX) & (key < length) & (key + BOX > begin)
    return gl.load(table + key // BLOCK_SIZE, mask=there, other=-1)


@gluon.jit
def _load(x, bar, slot, pages, page_units, first_unit, row, boxes, BOX: gl.constexpr, BLOCK_N: gl.constexpr,
          D: gl.constexpr, COPIES: gl.constexpr):  # fmt: skip
    """Loads a block of pages from their row `row` on; zeros for page -1, because TMA gives zeros outside the map.

    A page number passes from its lane to the copy as a sum over the warp: one instruction, which writes a uniform
    register.  `boxes` is BLOCK_N // BOX, an argument so that the compiler keeps the loop: unrolled, 16 boxes spill.
    """
    UNROLLED: gl.constexpr = min(4, BLOCK_N // BOX)
    mbarrier.expect(bar, BLOCK_N * D * (x.dtype.primitive_bitwidth // 8))
    views = reinterpret(slot, x.dtype, [BLOCK_N // BOX * COPIES, 1, BOX // 8, D // 64 // COPIES, 8, 64], x.layout)
    lane = gl.arange(0, 32, pages.type.layout)
    units = gl.where(pages < 0, -1, pages * page_units + first_unit)
    for some in range(boxes // UNROLLED):
        for nth in gl.static_range(UNROLLED):
            part = some * UNROLLED + nth
            unit = gl.sum(gl.where(lane == part, units, 0), 0)
            for copy in gl.static_range(COPIES):
                view = views.index(copy * (BLOCK_N // BOX) + part)
                async_load(x, [unit, row // 8, 0, 0, copy * 64], bar, view)


@gluon.jit
def _clear(slot, left, BLOCK_N: gl.constexpr, D: gl.constexpr, COPIES: gl.constexpr):
    """Writes zeros over the values from `left` on, eight rows at a time, because a page may hold NaN there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    atoms = reinterpret(slot, slot.dtype, [BLOCK_N // 8 * (D // 64), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    DOWN: gl.constexpr = D // 64 // COPIES  # atoms from 8 rows to the next 8
    ACROSS: gl.constexpr = BLOCK_N // 8 if COPIES > 1 else 1  # and from 64 columns to the next 64
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    part = left // 8
    for column in range(D // 64):
        view = atoms.index(column * ACROSS + part * DOWN)
        rows_before = view.load(layout)
        view.store(gl.where((rows < left % 8)[:, None], rows_before, 0.0))
        for behind in range(part + 1, BLOCK_N // 8):
            atoms.index(column * ACROSS + behind * DOWN).store(gl.zeros([8, 64], slot.dtype, layout))
    fence_async_shared()


@gluon.jit
def _produce(
    k, v, table, table_stride, cu, lens, B, H_kv, tiles, window, k_page, k_head, v_page, v_head, boxes, keys, values,
    k_full, k_empty, v_full, v_empty,
    D: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Loads a block's keys before the values of the block before it, in the order in which the products need them."""
    slot = 0
    phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    v_slot = 0
    v_phase = 1
    landed_phase = 0
    for turn in range(gl.cdiv(tiles * H_kv - gl.program_id(0), gl.num_programs(0))):
        kv_head, b, _, _, _, length, low, high, begin = _place(
            turn, cu, lens, B, H_kv, tiles, window, GROUP, BLOCK_N, WINDOW
        )
        own = table + b.to(gl.int64) * table_stride
        start = (high - 1) * BLOCK_N
        coming = _pages(own, start, begin, length, BLOCK_SIZE, BOX, BLOCK_N)
        before = gl.zeros_like(coming)
        for step in range(high - low + 1):
            pages = coming
            coming = _pages(own, start - BLOCK_N, begin, length, BLOCK_SIZE, BOX, BLOCK_N)
            if step < high - low:
                mbarrier.wait(k_empty.index(slot), phase)
                _load(k, k_full.index(slot), keys.index(slot), pages, k_page, kv_head * k_head, start % BLOCK_SIZE,
                      boxes, BOX, BLOCK_N, D, COPIES)  # fmt: skip
                slot, phase = _next(slot, phase, STAGES)
            if step > 0:
                first = start + BLOCK_N
                # Values that the end cuts are `full` once the rest is zeros; the last barrier is that of their bytes.
                cut = first + BLOCK_N > length
                mbarrier.wait(v_empty.index(v_slot), v_phase)
                _load(v, v_full.index(gl.where(cut, STAGES, v_slot)), values.index(v_slot), before, v_page,
                      kv_head * v_head, first % BLOCK_SIZE, boxes, BOX, BLOCK_N, D, COPIES)  # fmt: skip
                if cut:
                    mbarrier.wait(v_full.index(STAGES), landed_phase)
                    landed_phase ^= 1
                    _clear(values.index(v_slot), length - first, BLOCK_N, D, COPIES)
                    mbarrier.arrive(v_full.index(v_slot))
                v_slot, v_phase = _next(v_slot, v_phase, STAGES)
            before = pages
            start -= BLOCK_N


@gluon.jit
def _softmax(
    scores, m_i, l_i, scale, factor, window, cap, first, positions, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, NEGATED: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Weights, new m_i and l_i, and the factor that rescales earlier sums, base 2; positions: of the rows.

    A score times `factor` is its exponent, in one multiply-add with m_i, which is kept in the exponents' unit.
    """
    layout: gl.constexpr = scores.type.layout
    if SOFTCAP:
        scores = capped(scores * scale, cap)
    elif NEGATED:
        scores = -scores
    if MASKED:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        seen = keys[None, :] <= (positions - first)[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > (positions - window - first)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    highest = gl.maximum(m_i, gl.max(scores, 1) * factor)
    # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN.
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * factor - shift[:, None])
    shrink = gl.exp2(m_i - shift)
    return weights, highest, l_i * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _steps(
    q_tile, keys, values, k_full, k_empty, v_full, v_empty, weights, shrink, accumulator, m_i, l_i, slot, phase,
    v_slot, v_phase, from_block, to_block, low, positions, scale, factor, window, cap,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    NEGATED: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Blocks `from_block` down to `to_block`: a block's exponentials overlap the value product of the block before.
    The block's keys have arrived; each step but that of block `low` waits for the next block's."""
    layout: gl.constexpr = weights.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, 2)
    D: gl.constexpr = accumulator.shape[1]
    for step in range(from_block - to_block):
        block = from_block - 1 - step
        nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        key_tile = _tile(keys, slot, BLOCK_N, D, COPIES)
        scores = warpgroup_mma(q_tile, key_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        accumulator *= gl.convert_layout(shrink, gl.SliceLayout(1, accumulator.type.layout))[:, None]
        factors = gl.convert_layout(weights.to(keys.dtype), operand)
        accumulator = warpgroup_mma(factors, _tile(values, v_slot, BLOCK_N, D, COPIES), accumulator, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        weights, m_i, l_i, shrink = _softmax(
            scores, m_i, l_i, scale, factor, window, cap, block * BLOCK_N, positions, MASKED, WINDOW, SOFTCAP,
            NEGATED, BLOCK_N,
        )  # fmt: skip
        slot, phase = _next(slot, phase, STAGES)
        # This wait is a loop, over which the assembler moves no wait for products.  Without it here, it moved that wait
        # before the exponentials, which then overlapped no product of this warpgroup.
        mbarrier.wait(k_full.index(slot), phase, pred=block > low)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = _next(v_slot, v_phase, STAGES)
    return weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase
