"""Device code of `tma_pages`: a producer warp that loads pages, and two consumer warpgroups of 64 rows each.

Keys and values have a ring of slots each.  A slot is `full` when its bytes have arrived, and `empty` when both
consumers' products of it are done.  A slot is a block of keys made of boxes, each with rows of one page and 64 columns,
which is how wgmma's swizzled tile is stored in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rooflab.kernels._attention import LN2 as _LN2
from rooflab.kernels._attention import LOG2E as _LOG2E
from rooflab.kernels._attention import capped

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


@gluon.jit
def _load(x, bar, slot, table, kv_head, start, begin, length, nowhere, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
          BLOCK_N: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Loads a block's pages; zeros for pages past the end and for pages before all windows, which may have been freed:
    their page number is `nowhere`, outside the map, where TMA gives zeros."""
    mbarrier.expect(bar, BLOCK_N * D * (x.dtype.primitive_bitwidth // 8))
    boxes = slot._reinterpret(x.dtype, [BLOCK_N // BOX * (D // 64), 1, 1, BOX, 64], x.layout)
    for part in gl.static_range(BLOCK_N // BOX):
        key = start + part * BOX
        page = gl.load(table + key // BLOCK_SIZE, mask=(key < length) & (key + BOX > begin), other=nowhere)
        for column in gl.static_range(D // 64):
            view = boxes.index(column * (BLOCK_N // BOX) + part)
            tma.async_copy_global_to_shared(x, [page, kv_head, key % BLOCK_SIZE, column * 64], bar, view)


@gluon.jit
def _clear(slot, left, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Writes zeros over the values from `left` on, eight rows at a time, because a page may hold NaN there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    parts = slot._reinterpret(slot.dtype, [BLOCK_N // 8 * (D // 64), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    rows = gl.arange(0, 8, gl.SliceLayout(1, layout))
    part = left // 8
    for column in range(D // 64):
        view = parts.index(column * (BLOCK_N // 8) + part)
        rows_before = view.load(layout)
        view.store(gl.where((rows < left % 8)[:, None], rows_before, 0.0))
        for behind in range(part + 1, BLOCK_N // 8):
            parts.index(column * (BLOCK_N // 8) + behind).store(gl.zeros([8, 64], slot.dtype, layout))
    fence_async_shared()


@gluon.jit
def _produce(
    k, v, table, table_stride, cu, lens, B, H_kv, tiles, window, nowhere, keys, values,
    k_full, k_empty, v_full, v_empty, landed,
    D: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    slot = 0
    phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    landed_phase = 0
    for turn in range(gl.cdiv(tiles * H_kv - gl.program_id(0), gl.num_programs(0))):
        kv_head, b, _, _, _, length, low, high, begin = _place(
            turn, cu, lens, B, H_kv, tiles, window, GROUP, BLOCK_N, WINDOW
        )
        own = table + b.to(gl.int64) * table_stride
        for step in range(high - low):
            start = (high - 1 - step) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase)
            _load(k, k_full.index(slot), keys.index(slot), own, kv_head, start, begin, length, nowhere,
                  BLOCK_SIZE, BOX, BLOCK_N, D)  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase)
            if start + BLOCK_N > length:
                _load(v, landed, values.index(slot), own, kv_head, start, begin, length, nowhere,
                      BLOCK_SIZE, BOX, BLOCK_N, D)  # fmt: skip
                mbarrier.wait(landed, landed_phase)
                landed_phase ^= 1
                _clear(values.index(slot), length - start, BLOCK_N, D)
                mbarrier.arrive(v_full.index(slot))
            else:
                _load(v, v_full.index(slot), values.index(slot), own, kv_head, start, begin, length, nowhere,
                      BLOCK_SIZE, BOX, BLOCK_N, D)  # fmt: skip
            slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _softmax(
    scores, peak, total, scale, window, cap, first, positions, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Weights, new running peak and sum, and the factor that rescales earlier sums, base 2; positions: of the rows."""
    layout: gl.constexpr = scores.type.layout
    if SOFTCAP:
        scores = capped(scores * scale, cap) * LOG2E
    else:
        scores *= scale
    if MASKED:
        keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        seen = keys[None, :] <= (positions - first)[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > (positions - window - first)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    highest = gl.maximum(peak, gl.max(scores, 1))
    # The peak of a row that has seen no key is -inf, and -inf - -inf would be NaN.
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores - shift[:, None])
    shrink = gl.exp2(peak - shift)
    return weights, highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _steps(
    q_tile, keys, values, k_full, k_empty, v_full, v_empty, weights, shrink, accumulator, peak, total, slot, phase,
    v_slot, v_phase, from_block, to_block, positions, scale, window, cap,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Blocks `from_block` down to `to_block`: a block's exponentials overlap the value product of the block before."""
    layout: gl.constexpr = weights.type.layout
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, 2)
    for step in range(from_block - to_block):
        first = (from_block - 1 - step) * BLOCK_N
        nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q_tile, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        accumulator *= gl.convert_layout(shrink, gl.SliceLayout(1, accumulator.type.layout))[:, None]
        factors = gl.convert_layout(weights.to(keys.dtype), factor)
        accumulator = warpgroup_mma(factors, values.index(v_slot), accumulator, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        weights, peak, total, shrink = _softmax(
            scores, peak, total, scale, window, cap, first, positions, MASKED, WINDOW, SOFTCAP, BLOCK_N
        )
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(v_slot))
        slot, phase = _next(slot, phase, STAGES)
        v_slot, v_phase = _next(v_slot, v_phase, STAGES)
    return weights, shrink, accumulator, peak, total, slot, phase, v_slot, v_phase
