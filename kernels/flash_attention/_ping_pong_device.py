"""Device code of `ping_pong`: a producer warp, two or three consumer warpgroups, and the barriers between them.

Keys and values have a ring of slots each.  A slot is `full` when its bytes have arrived, and `empty` when all
consumers' products of it are done.  Two consumers pass `turn` to each other: its holder starts its two products of a
step, then passes it on and computes its exponentials.  Three consumers need no turn (see `_step`).
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
from triton.language.extra.cuda import globaltimer, smid

from rooflab.kernels import _attention as shared
from rooflab.kernels._gluon import async_load, async_store, reinterpret
from rooflab.kernels.flash_attention._order_device import count_tiles, nth_tile, place
from rooflab.kernels.flash_attention._ping_pong_softmax import (
    ROWS,
    capped,
    kinds,
    masked,
    packed,
    rescaled,
    softmax,
    unpacked,
    visible,
)

LN2: gl.constexpr = gl.constexpr(shared.LN2)
LOG2E: gl.constexpr = gl.constexpr(shared.LOG2E)


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), phase ^ last.to(gl.int32)


@gluon.jit
def _load(x, bar, ring, slot, b, h, row, ROWS_OF: gl.constexpr, D: gl.constexpr):
    mbarrier.expect(bar, x.block_type.nbytes)
    view = reinterpret(ring.index(slot), x.dtype, [1, 1, ROWS_OF, D], x.layout)
    async_load(x, [b, h, row, 0], bar, view)


@gluon.jit
def _produce(
    q, k, v, group, order, rings, barriers,
    CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    T, S, H, heads, tiles_m, section, window = order
    queries, keys, values = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    slot = 0
    phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    v_slot = 0
    v_phase = 1
    q_phase = 1
    for nth in range(count_tiles(tiles_m * heads, gl.program_id(0), gl.num_programs(0))):
        tile = nth_tile(nth, gl.program_id(0), gl.num_programs(0))
        tile_m, head = place(tile, tiles_m, heads, section, CAUSAL)
        row = tile_m * (CONSUMERS * ROWS)
        b = head // H
        h = head % H
        begin, end = visible(row, T, S, window, CONSUMERS, BLOCK_N, CAUSAL)
        for step in range(end - begin):
            first = (end - 1 - step) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase)
            _load(k, k_full.index(slot), keys, slot, b, h // group, first, BLOCK_N, D)
            slot, phase = _next(slot, phase, STAGES)
            if step == 0:
                for of in gl.static_range(CONSUMERS):
                    mbarrier.wait(q_empty.index(of), q_phase)
                    _load(q, q_full.index(of), queries, of, b, h, row + of * ROWS, ROWS, D)
            else:
                mbarrier.wait(v_empty.index(v_slot), v_phase)
                _load(v, v_full.index(v_slot), values, v_slot, b, h // group, first + BLOCK_N, BLOCK_N, D)
                v_slot, v_phase = _next(v_slot, v_phase, STAGES)
        mbarrier.wait(v_empty.index(v_slot), v_phase)
        _load(v, v_full.index(v_slot), values, v_slot, b, h // group, begin * BLOCK_N, BLOCK_N, D)
        v_slot, v_phase = _next(v_slot, v_phase, STAGES)
        q_phase ^= 1


@gluon.jit
def _step(
    q_tile, keys, values, barriers, weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase, turn_phase,
    first, begin, row, T, S, window, scales,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, NTH: gl.constexpr,
    LAZY: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The scores of the block at `first`, the value product of the last block, whose weights are known, and the softmax
    of this block.  Also waits for the next step's keys.

    One of two consumers computes this softmax while its value product runs, and waits for its next turn.  One of three
    first waits for both products: so it holds one set of weights, and fits in 160 registers; the other two fill the
    pause.  Its value product goes first: where tensor cores alternate between warps, 64 columns of values then lose
    time to another's 128 columns of scores, and consumers do not fall into step."""
    factor: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, 2)
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout)
    _, _, k_full, k_empty, v_full, v_empty, turn = barriers
    scale, stretch, cap = scales
    if CONSUMERS == 2:
        scores = warpgroup_mma(q_tile, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), v_phase)
    if CONSUMERS == 2:
        accumulator = rescaled(accumulator, shrink, LAZY)
    factors = unpacked(weights, keys.dtype, factor)
    accumulator = warpgroup_mma(factors, values.index(v_slot), accumulator, is_async=True)
    if CONSUMERS == 2:
        mbarrier.arrive(turn.index(1 - NTH))
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
    else:
        scores = warpgroup_mma(q_tile, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores, accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(scores, accumulator))
        mbarrier.arrive(k_empty.index(slot))
        mbarrier.arrive(v_empty.index(v_slot))
    if cap is not None:
        scores = capped(scores, stretch, cap)
    if MASKED:
        scores = masked(scores, first, row, T, S, window, BLOCK_N, CAUSAL)
    weights, m_i, l_i, shrink = softmax(scores, m_i, l_i, scale, MASKED, LAZY)
    if CONSUMERS == 2:
        weights = packed(weights, keys.dtype)
    else:
        accumulator = rescaled(accumulator, shrink, LAZY)
    used = v_slot
    slot, phase = _next(slot, phase, STAGES)
    v_slot, v_phase = _next(v_slot, v_phase, STAGES)
    # These waits are loops, and the assembler moves no wait for products across a loop.  Without a loop here it moved
    # that wait before the exponentials, which then overlapped no product of this warpgroup.
    mbarrier.wait(k_full.index(slot), phase, pred=first > begin)
    if CONSUMERS == 2:
        mbarrier.wait(turn.index(NTH), turn_phase ^ 1, pred=first > begin)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(used))
    return weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase, turn_phase ^ 1


@gluon.jit
def _finish(
    out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, T, b, h, row, staged, accumulator, m_i,
    l_i, D: gl.constexpr,
):  # fmt: skip
    """Divides by the sum, including the head's sink, and stores."""
    layout: gl.constexpr = accumulator.type.layout
    shift = m_i
    share = gl.full((ROWS,), 1.0, gl.float32, m_i.type.layout)
    if sinks is not None:
        sink = gl.load(sinks + h * sinks_stride) * LOG2E
        highest = gl.maximum(shift, sink)
        share = gl.exp2(shift - highest)
        l_i = l_i * share + gl.exp2(sink - highest)
        shift = highest
    if lse is not None:
        offsets = row + gl.arange(0, ROWS, m_i.type.layout)
        natural = gl.where(l_i == 0.0, float("-inf"), (shift + gl.log2(l_i)) * LN2)
        base = lse + b.to(gl.int64) * lse_stride_b + h.to(gl.int64) * lse_stride_h
        gl.store(base + offsets.to(gl.int64) * lse_stride_t, natural, mask=offsets < T)
    share = share / gl.where(l_i == 0.0, 1.0, l_i)
    result = accumulator * gl.convert_layout(share, gl.SliceLayout(1, layout))[:, None]
    staged.store(result.to(out.dtype))
    fence_async_shared()
    async_store(out, [b, h, row, 0], reinterpret(staged, out.dtype, [1, 1, ROWS, D], out.layout))


@gluon.jit
def _consume(
    results, order, scales, rings, staged, barriers,
    CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    OUT_IN_Q: gl.constexpr, LAZY: gl.constexpr, NTH: gl.constexpr,
):  # fmt: skip
    out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, timeline = results
    T, S, H, heads, tiles_m, section, window = order
    scale, stretch, cap = scales
    queries, keys, values = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turn = barriers
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    factor: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    q_tile = queries.index(NTH)
    slot = 0
    phase = 0
    v_slot = 0
    v_phase = 0
    q_phase = 0
    turn_phase = 1 - NTH  # the first consumer begins
    for nth in range(count_tiles(tiles_m * heads, gl.program_id(0), gl.num_programs(0))):
        tile = nth_tile(nth, gl.program_id(0), gl.num_programs(0))
        if timeline is not None and NTH == 0:
            began = globaltimer()
        tile_m, head = place(tile, tiles_m, heads, section, CAUSAL)
        row = tile_m * (CONSUMERS * ROWS)
        begin, end = visible(row, T, S, window, CONSUMERS, BLOCK_N, CAUSAL)
        row += NTH * ROWS
        crossed, whole = kinds(row, T, S, window, begin, end, BLOCK_N, CAUSAL)
        far = end - 1 - begin - crossed - whole
        begin *= BLOCK_N
        first = (end - 1) * BLOCK_N
        nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, scores_layout)
        mbarrier.wait(q_full.index(NTH), q_phase)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q_tile, keys.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(k_empty.index(slot))
        if cap is not None:
            scores = capped(scores, stretch, cap)
        scores = masked(scores, first, row, T, S, window, BLOCK_N, CAUSAL)
        m_i = gl.full((ROWS,), float("-inf"), gl.float32, rows)
        weights, m_i, l_i, shrink = softmax(scores, m_i, gl.zeros((ROWS,), gl.float32, rows), scale, True, LAZY)
        if CONSUMERS == 2:
            weights = packed(weights, keys.dtype)
        accumulator = gl.zeros((ROWS, D), gl.float32, layout)
        slot, phase = _next(slot, phase, STAGES)
        mbarrier.wait(k_full.index(slot), phase, pred=first > begin)
        if CONSUMERS == 2:
            mbarrier.wait(turn.index(NTH), turn_phase, pred=first > begin)
        for kind in gl.static_range(3):
            if kind == 1 or (CAUSAL and (kind == 0 or window is not None)):
                steps = (crossed, whole, far)[kind]
                for _ in range(steps):
                    first -= BLOCK_N
                    weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase, turn_phase = _step(
                        q_tile, keys, values, barriers, weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot,
                        v_phase, turn_phase, first, begin, row, T, S, window, scales,
                        CONSUMERS, BLOCK_N, STAGES, CAUSAL, NTH, LAZY, kind != 1, scores_layout,
                    )  # fmt: skip
        if not OUT_IN_Q:
            mbarrier.arrive(q_empty.index(NTH))
        mbarrier.wait(v_full.index(v_slot), v_phase)
        if CONSUMERS == 2:
            accumulator = rescaled(accumulator, shrink, LAZY)
        factors = unpacked(weights, keys.dtype, factor)
        accumulator = warpgroup_mma(factors, values.index(v_slot), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = _next(v_slot, v_phase, STAGES)
        q_phase ^= 1
        if not OUT_IN_Q:
            tma.store_wait(pendings=0)  # TMA has read the data staged here before
        _finish(
            out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, T, head // H, head % H, row,
            staged.index(NTH), accumulator, m_i, l_i, D,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_empty.index(NTH))
        if timeline is not None and NTH == 0:
            kept = timeline + (head * tiles_m + tile_m).to(gl.int64) * 3
            gl.store(kept, smid().to(gl.int64))
            gl.store(kept + 1, began)
            gl.store(kept + 2, globaltimer())
    if not OUT_IN_Q:
        tma.store_wait(pendings=0)  # the CTA's shared memory must live until TMA has read it


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@gluon.jit(do_not_specialize=["T", "S", "heads", "section", "window", "lse_stride_b"])
def _attention(
    q, k, v, out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, T, S, H, group, heads, section,
    window, scale, stretch, cap, timeline,
    CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    LAZY: gl.constexpr, OUT_IN_Q: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(T, CONSUMERS * ROWS)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, D], swizzled)
    keys = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, D], swizzled)
    values = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, D], swizzled)
    staged = queries
    if not OUT_IN_Q:
        staged = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, D], swizzled)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for of in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(of), count=1)
        mbarrier.init(q_empty.index(of), count=1)
        mbarrier.init(turn.index(of), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=CONSUMERS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    results = (out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, timeline)
    order = (T, S, H, heads, tiles_m, section, window)
    scales = (scale, stretch, cap)
    rings = (queries, keys, values)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, turn)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (results, order, scales, rings, staged, barriers,
                            CONSUMERS, D, BLOCK_N, STAGES, CAUSAL, OUT_IN_Q, LAZY, 0)),
                (_consume, (results, order, scales, rings, staged, barriers,
                            CONSUMERS, D, BLOCK_N, STAGES, CAUSAL, OUT_IN_Q, LAZY, 1)),
                (_produce, (q, k, v, group, order, rings, barriers, CONSUMERS, D, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (results, order, scales, rings, staged, barriers,
                            CONSUMERS, D, BLOCK_N, STAGES, CAUSAL, OUT_IN_Q, LAZY, 0)),
                (_consume, (results, order, scales, rings, staged, barriers,
                            CONSUMERS, D, BLOCK_N, STAGES, CAUSAL, OUT_IN_Q, LAZY, 1)),
                (_consume, (results, order, scales, rings, staged, barriers,
                            CONSUMERS, D, BLOCK_N, STAGES, CAUSAL, OUT_IN_Q, LAZY, 2)),
                (_produce, (q, k, v, group, order, rings, barriers, CONSUMERS, D, BLOCK_N, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
