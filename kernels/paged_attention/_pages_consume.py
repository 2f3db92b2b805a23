"""Device code of `tma_pages`, second part: a consumer's tiles, and the kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rooflab.kernels.paged_attention._pages_device import (
    LN2,
    LOG2E,
    ROWS,
    _next,
    _place,
    _produce,
    _softmax,
    _steps,
    _tile,
)


@gluon.jit
def _consume(
    q, out, lse, sinks, cu, lens, B, H_kv, tiles, scale, factor, window, cap,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    queries_tile, keys, values, k_full, k_empty, v_full, v_empty,
    HEAD_DIM: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, NEGATED: gl.constexpr, COPIES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_tile = queries_tile.index(HALF)
    slot = 0
    phase = 0
    v_slot = 0
    v_phase = 0
    for turn in range(gl.cdiv(tiles * H_kv - gl.program_id(0), gl.num_programs(0))):
        kv_head, b, first_query, queries, row, length, low, high, _ = _place(
            turn, cu, lens, B, H_kv, tiles, window, GROUP, BLOCK_N, WINDOW
        )
        row += HALF * ROWS
        numbers = row + gl.arange(0, ROWS, gl.SliceLayout(1, loaded))
        dims = gl.arange(0, D, gl.SliceLayout(0, loaded))
        token = (first_query + numbers // GROUP).to(gl.int64)
        head = (kv_head * GROUP + numbers % GROUP).to(gl.int64)
        there = (numbers < queries * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = gl.load(q + (token * q_stride_t + head * q_stride_h)[:, None] + dims[None, :], mask=there, other=0.0)
        q_tile.store(rows)
        fence_async_shared()

        mine = row + gl.arange(0, ROWS, rows_layout)
        positions = length - queries + mine // GROUP
        m_i = gl.full((ROWS,), float("-inf"), gl.float32, rows_layout)
        l_i = gl.zeros((ROWS,), gl.float32, rows_layout)
        accumulator = gl.zeros((ROWS, D), gl.float32, layout)
        if low < high:
            nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, scores_layout)
            mbarrier.wait(k_full.index(slot), phase)
            key_tile = _tile(keys, slot, BLOCK_N, D, COPIES)
            scores = warpgroup_mma(q_tile, key_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            mbarrier.arrive(k_empty.index(slot))
            weights, m_i, l_i, shrink = _softmax(
                scores, m_i, l_i, scale, factor, window, cap, (high - 1) * BLOCK_N, positions, True, WINDOW, SOFTCAP,
                NEGATED, BLOCK_N,
            )  # fmt: skip
            slot, phase = _next(slot, phase, STAGES)
            mbarrier.wait(k_full.index(slot), phase, pred=high - 1 > low)
            # All rows of this half see the blocks below `plain` (with a window not those below `near`).
            plain = gl.maximum(length - queries + row // GROUP + 1, 0) // BLOCK_N
            plain = gl.minimum(gl.maximum(plain, low), high - 1)
            near = low
            if WINDOW:
                last = gl.minimum((row + ROWS - 1) // GROUP, queries - 1)
                near = gl.cdiv(gl.maximum(length - queries + last + 1 - window, 0), BLOCK_N)
                near = gl.minimum(gl.maximum(near, low), plain)
            weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase = _steps(
                q_tile, keys, values, k_full, k_empty, v_full, v_empty, weights, shrink, accumulator, m_i, l_i,
                slot, phase, v_slot, v_phase, high - 1, plain, low, positions, scale, factor, window, cap,
                BLOCK_N, STAGES, True, WINDOW, SOFTCAP, NEGATED, COPIES,
            )  # fmt: skip
            weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase = _steps(
                q_tile, keys, values, k_full, k_empty, v_full, v_empty, weights, shrink, accumulator, m_i, l_i,
                slot, phase, v_slot, v_phase, plain, near, low, positions, scale, factor, window, cap,
                BLOCK_N, STAGES, False, WINDOW, SOFTCAP, NEGATED, COPIES,
            )  # fmt: skip
            if WINDOW:
                weights, shrink, accumulator, m_i, l_i, slot, phase, v_slot, v_phase = _steps(
                    q_tile, keys, values, k_full, k_empty, v_full, v_empty, weights, shrink, accumulator, m_i, l_i,
                    slot, phase, v_slot, v_phase, near, low, low, positions, scale, factor, window, cap,
                    BLOCK_N, STAGES, True, WINDOW, SOFTCAP, NEGATED, COPIES,
                )  # fmt: skip
            mbarrier.wait(v_full.index(v_slot), v_phase)
            accumulator *= gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
            factors = gl.convert_layout(weights.to(keys.dtype), operand)
            accumulator = warpgroup_mma(factors, _tile(values, v_slot, BLOCK_N, D, COPIES), accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
            mbarrier.arrive(v_empty.index(v_slot))
            v_slot, v_phase = _next(v_slot, v_phase, STAGES)

        own_head = kv_head * GROUP + mine % GROUP
        if sinks is not None:
            sink = gl.load(sinks + own_head, mask=mine < queries * GROUP, other=0.0) * LOG2E
            most = gl.maximum(m_i, sink)
            # Without keys and with a sink of -inf, -inf - -inf would be NaN.
            shift = gl.where(most == float("-inf"), 0.0, most)
            shrink = gl.exp2(m_i - shift)
            l_i = l_i * shrink + gl.exp2(sink - shift)
            accumulator *= gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
            m_i = most
        some = gl.where(l_i == 0.0, 1.0, l_i)
        if lse is not None:
            natural = gl.where(l_i == 0.0, float("-inf"), (m_i + gl.log2(some)) * LN2)
            own_token = (first_query + mine // GROUP).to(gl.int64)
            gl.store(
                lse + own_token * lse_stride_t + own_head.to(gl.int64) * lse_stride_h,
                natural,
                mask=mine < queries * GROUP,
            )
        result = accumulator * gl.convert_layout(1.0 / some, gl.SliceLayout(1, layout))[:, None]
        q_tile.store(result.to(out.dtype.element_ty))  # through the queries' memory, so that rows are stored whole
        result = q_tile.load(loaded)
        gl.store(out + (token * out_stride_t + head * out_stride_h)[:, None] + dims[None, :], result, mask=there)


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@gluon.jit(do_not_specialize=["B", "tiles", "window", "table_stride", "boxes"])
def pages_kernel(
    q, k, v, out, lse, sinks, table, lens, cu, B, H_kv, tiles, k_page, k_head, v_page, v_head, boxes, scale, factor,
    window, cap,
    q_stride_t, q_stride_h, table_stride, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    HEAD_DIM: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, NEGATED: gl.constexpr,
    COPIES: gl.constexpr,
):  # fmt: skip
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], swizzled)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], swizzled)
    values = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], swizzled)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(v_full.index(STAGES), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (q, out, lse, sinks, cu, lens, B, H_kv, tiles, scale, factor, window, cap,
                        q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
                        queries, keys, values, k_full, k_empty, v_full, v_empty,
                        HEAD_DIM, D, GROUP, BLOCK_N, STAGES, WINDOW, SOFTCAP, NEGATED, COPIES, 0)),
            (_consume, (q, out, lse, sinks, cu, lens, B, H_kv, tiles, scale, factor, window, cap,
                        q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
                        queries, keys, values, k_full, k_empty, v_full, v_empty,
                        HEAD_DIM, D, GROUP, BLOCK_N, STAGES, WINDOW, SOFTCAP, NEGATED, COPIES, 1)),
            (_produce, (k, v, table, table_stride, cu, lens, B, H_kv, tiles, window, k_page, k_head, v_page,
                        v_head, boxes, keys, values, k_full, k_empty, v_full, v_empty,
                        D, GROUP, BLOCK_SIZE, BOX, BLOCK_N, STAGES, WINDOW, COPIES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
