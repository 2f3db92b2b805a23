"""The kernel `tma_pages`, in Gluon, improves on `chunked`.  TMA copies pages, and a separate warp issues the copies.

In `chunked`, the warps that multiply compute an address for each 16 bytes.  Here one thread issues one copy for the
keys of one page and head.

Two warpgroups have 64 rows each.  A row is one query of one head.  Each warpgroup overlaps the matmul of one block with
the exponentials of the next block (Shah et al., "FlashAttention-3", arXiv 2407.08608).  A page may hold NaN past the
end of its sequence, so the producer writes zeros there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rooflab.kernels._attention import strides_of
from rooflab.kernels._device import sm_count
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import attention_gluon as attention
from rooflab.kernels.lib.tma import advance, async_load, new_barriers, reinterpret
from rooflab.kernels.paged_attention._args import pages_from, traffic
from rooflab.kernels.paged_attention._configs import tiles_at_most
from rooflab.kernels.paged_attention._pages_args import (
    MIN_PAGE_TOKENS,
    TMA_PAGES_TUNING,
    PagesConfig,
    cache_map,
    why_too_far,
)
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.reference.spec import Arguments

ROWS: gl.constexpr = attention.WARPGROUP_ROWS


# Device code.  Keys and values have a ring of slots each.  A slot is a block of keys, made of boxes with rows of one
# page each.  It is `full` when its bytes have arrived, and `empty` when both consumers' products of it are done.


@gluon.jit
def _bound(cu, b):
    return gl.load(cu + b) if cu is not None else b


@gluon.jit
def _place(turn, work, GROUP: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the tile of this CTA in round `turn`: its sequence, KV head and first row, and the range of key blocks
    that it sees.  Also returns the first query, the number of queries, the sequence length and the first visible key.
    The last tiles of a sequence come first.
    """
    cu, lengths, B, H_kv, tiles, window = work
    work_id = turn * gl.num_programs(0) + gl.program_id(0)
    tile_index = tiles - 1 - work_id // H_kv
    low_sequence = 0
    high = B
    while high - low_sequence > 1:
        middle_sequence = (low_sequence + high) // 2
        starts_after_tile = _bound(cu, middle_sequence) * GROUP // (2 * ROWS) + middle_sequence > tile_index
        high = gl.where(starts_after_tile, middle_sequence, high)
        low_sequence = gl.where(starts_after_tile, low_sequence, middle_sequence)
    b = low_sequence
    first_query = _bound(cu, b)
    queries = _bound(cu, b + 1) - first_query
    row = (tile_index - first_query * GROUP // (2 * ROWS) - b) * (2 * ROWS)
    length = gl.load(lengths + b)
    last_query = gl.minimum((row + 2 * ROWS - 1) // GROUP, queries - 1)
    visible_end = gl.maximum(length - queries + last_query + 1, 0)
    visible_end = gl.where(row < queries * GROUP, visible_end, 0)
    first_key = 0
    if window is not None:
        first_key = gl.maximum(length - queries + row // GROUP + 1 - window, 0)
    high = gl.cdiv(visible_end, BLOCK_N)
    return work_id % H_kv, b, first_query, queries, row, length, gl.minimum(first_key // BLOCK_N, high), high, first_key


@gluon.constexpr_function
def tile_layout(rows, columns, copies):
    """Returns the layout of a tile in shared memory: wgmma's swizzled atoms of 8 rows and 64 columns.  If one TMA copy
    loads all columns, atoms of the same rows are neighbours, else atoms of the same columns."""
    atom = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    column_bases = [[0, column] for column in (64, 128) if column < columns]
    row_base = [[row, 0] for row in (8, 16, 32, 64, 128) if row < rows]
    return gl.SharedLinearLayout(atom + (column_bases + row_base if copies == 1 else row_base + column_bases), [], 1024)


@gluon.jit
def _tile(ring, slot, COPIES: gl.constexpr):
    slot_layout: gl.constexpr = tile_layout(ring.shape[1], ring.shape[2], COPIES)
    return reinterpret(ring.index(slot), ring.dtype, [ring.shape[1], ring.shape[2]], slot_layout)


@gluon.jit
def _pages(table, start, begin, length, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the page numbers for the TMA copies of one key block, one number per lane.  The number is -1 past the end
    of the sequence. It is also -1 before the first visible key, where pages may be free already."""
    lane_ids = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    key = start + lane_ids * BOX
    box_mask = (lane_ids < BLOCK_N // BOX) & (key < length) & (key + BOX > begin)
    return gl.load(table + key // BLOCK_SIZE, mask=box_mask, other=-1)


@gluon.jit
def _load(x, bar, slot, pages, page_units, first_unit, row, boxes, BOX: gl.constexpr, COPIES: gl.constexpr):
    """Loads a block of keys or values by TMA, from row `row` of each page on.  A page number of -1 gives zeros.

    Lane i holds the page number of part i of the block.  A sum over the warp gives it to all lanes: the others add 0.
    At most four parts are unrolled, because 16 would spill registers."""
    BLOCK_N: gl.constexpr = slot.shape[0]
    D: gl.constexpr = slot.shape[1]
    UNROLLED_BOXES: gl.constexpr = min(4, BLOCK_N // BOX)
    mbarrier.expect(bar, BLOCK_N * D * (x.dtype.primitive_bitwidth // 8))
    box_views = reinterpret(slot, x.dtype, [BLOCK_N // BOX * COPIES, 1, BOX // 8, D // 64 // COPIES, 8, 64], x.layout)
    lane_ids = gl.arange(0, 32, pages.type.layout)
    box_units = gl.where(pages < 0, -1, pages * page_units + first_unit)
    for box_group in range(boxes // UNROLLED_BOXES):
        for unroll_index in gl.static_range(UNROLLED_BOXES):
            box_index = box_group * UNROLLED_BOXES + unroll_index
            box_unit = gl.sum(gl.where(lane_ids == box_index, box_units, 0), 0)
            for copy_index in gl.static_range(COPIES):
                box_view = box_views.index(copy_index * (BLOCK_N // BOX) + box_index)
                async_load(x, [box_unit, row // 8, 0, 0, copy_index * 64], bar, box_view)


@gluon.jit
def _clear(slot, left, COPIES: gl.constexpr):
    """Writes zeros to a buffer slot, except its first `left` tokens.  The page may hold NaN after these."""
    BLOCK_N: gl.constexpr = slot.shape[0]
    D: gl.constexpr = slot.shape[1]
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    all_atoms = reinterpret(slot, slot.dtype, [BLOCK_N // 8 * (D // 64), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    ROW_STEP: gl.constexpr = D // 64 // COPIES  # atoms from 8 rows to the next 8
    COLUMN_STEP: gl.constexpr = BLOCK_N // 8 if COPIES > 1 else 1  # and from 64 columns to the next 64
    rows = gl.arange(0, 8, gl.SliceLayout(1, row_layout))
    atom_row = left // 8
    for column in range(D // 64):
        atom_view = all_atoms.index(column * COLUMN_STEP + atom_row * ROW_STEP)
        old_rows = atom_view.load(row_layout)
        atom_view.store(gl.where((rows < left % 8)[:, None], old_rows, 0.0))
        for next_row in range(atom_row + 1, BLOCK_N // 8):
            all_atoms.index(column * COLUMN_STEP + next_row * ROW_STEP).store(gl.zeros([8, 64], slot.dtype, row_layout))
    fence_async_shared()


@gluon.jit
def _produce(
    loads, work, memory, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr, COPIES: gl.constexpr
):
    """Runs the producer warp.  Each step loads the keys of a block, then the values of the previous block."""
    k, v, table, table_stride, k_page, k_head, v_page, v_head, box_count = loads
    cu, lengths, B, H_kv, tiles, window = work
    keys, values, k_full, k_empty, v_full, v_empty = memory
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    # A new barrier counts the phase before its first as complete: with a phase of 1 the first wait returns at once.
    slot, phase, v_slot, v_phase = 0, 1, 0, 1
    partial_phase = 0
    for tile_round in range(gl.cdiv(tiles * H_kv - gl.program_id(0), gl.num_programs(0))):
        kv_head, b, _, _, _, length, first_block, end_block, first_key = _place(tile_round, work, GROUP, BLOCK_N)
        table_row = table + b.to(gl.int64) * table_stride
        load_start = (end_block - 1) * BLOCK_N
        next_pages = _pages(table_row, load_start, first_key, length, BLOCK_SIZE, BOX, BLOCK_N)
        pages_before = gl.zeros_like(next_pages)
        for copy_step in range(end_block - first_block + 1):
            pages = next_pages
            next_pages = _pages(table_row, load_start - BLOCK_N, first_key, length, BLOCK_SIZE, BOX, BLOCK_N)
            if copy_step < end_block - first_block:
                mbarrier.wait(k_empty.index(slot), phase)
                _load(k, k_full.index(slot), keys.index(slot), pages, k_page, kv_head * k_head, load_start % BLOCK_SIZE,
                      box_count, BOX, COPIES)  # fmt: skip
                slot, phase = advance(slot, phase, keys)
            if copy_step > 0:
                block_start = load_start + BLOCK_N
                # Values that the end cuts are `full` once the rest is zeros; the last barrier is that of their bytes.
                is_partial = block_start + BLOCK_N > length
                mbarrier.wait(v_empty.index(v_slot), v_phase)
                _load(v, v_full.index(gl.where(is_partial, STAGES, v_slot)), values.index(v_slot), pages_before, v_page,
                      kv_head * v_head, block_start % BLOCK_SIZE, box_count, BOX, COPIES)  # fmt: skip
                if is_partial:
                    mbarrier.wait(v_full.index(STAGES), partial_phase)
                    partial_phase ^= 1
                    _clear(values.index(v_slot), length - block_start, COPIES)
                    mbarrier.arrive(v_full.index(v_slot))
                v_slot, v_phase = advance(v_slot, v_phase, values)
            pages_before = pages
            load_start -= BLOCK_N


@gluon.jit
def _steps(
    q_tile, memory, state, from_block, to_block, low, positions, scales, window,
    MASKED: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Computes attention for the key blocks from `from_block - 1` down to `to_block`.  The exponentials of a block
    overlap the value matmul of the block before it.  Each step but the tile's last, `low`, waits for the next keys."""
    weights, acc_scale, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase = state
    keys, values, k_full, k_empty, v_full, v_empty = memory
    BLOCK_N: gl.constexpr = keys.shape[1]
    weight_layout: gl.constexpr = weights.type.layout
    for block_step in range(from_block - to_block):
        key_block = from_block - 1 - block_step
        zero_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, weight_layout)
        key_tile = _tile(keys, k_slot, COPIES)
        scores = warpgroup_mma(q_tile, key_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_slot), v_phase)
        accumulator = attention.rescaled(accumulator, acc_scale)
        weight_operand = attention.as_factor(weights, keys.dtype, accumulator)
        accumulator = warpgroup_mma(weight_operand, _tile(values, v_slot, COPIES), accumulator, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_slot))
        last_key = (positions - key_block * BLOCK_N)[:, None]
        weights, m_i, l_i, acc_scale = attention.softmax(scores, m_i, l_i, scales, last_key, None, window, MASKED)
        k_slot, k_phase = advance(k_slot, k_phase, keys)
        # This wait is a loop, over which the assembler moves no wait for products.  Without it here, it moved that wait
        # before the exponentials, which then overlapped no product of this warpgroup.
        mbarrier.wait(k_full.index(k_slot), k_phase, pred=key_block > low)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = advance(v_slot, v_phase, values)
    return weights, acc_scale, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase


@gluon.jit
def _consume(
    args, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, NEGATED: gl.constexpr, COPIES: gl.constexpr, HALF: gl.constexpr
):
    """Runs a consumer warpgroup of the attention kernel.  It computes 64 rows of each tile, from the last key block to
    the first."""
    tensors, strides, scales, tile_args, queries_tile, memory = args
    q, out, lse, sinks = tensors
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h = strides
    cu, lengths, B, H_kv, tiles, window = tile_args
    keys, values, k_full, k_empty, v_full, v_empty = memory
    D: gl.constexpr = keys.shape[2]
    BLOCK_N: gl.constexpr = keys.shape[1]
    scores_layout: gl.constexpr = attention.product_layout(BLOCK_N)
    acc_layout: gl.constexpr = attention.product_layout(D)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_tile = queries_tile.index(HALF)
    k_slot, k_phase, v_slot, v_phase = 0, 0, 0, 0
    for tile_round in range(gl.cdiv(tiles * H_kv - gl.program_id(0), gl.num_programs(0))):
        kv_head, b, first_query, queries, row, length, low, high, _ = _place(tile_round, tile_args, GROUP, BLOCK_N)
        row += HALF * ROWS
        row_ids = row + gl.arange(0, ROWS, gl.SliceLayout(1, load_layout))
        dims = gl.arange(0, D, gl.SliceLayout(0, load_layout))
        token = (first_query + row_ids // GROUP).to(gl.int64)
        head = (kv_head * GROUP + row_ids % GROUP).to(gl.int64)
        row_mask = (row_ids < queries * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = gl.load(q + (token * q_stride_t + head * q_stride_h)[:, None] + dims[None, :], mask=row_mask, other=0.0)
        q_tile.store(-rows if NEGATED else rows)  # a negative scale: softmax takes a positive one
        fence_async_shared()  # wgmma reads what these threads stored

        thread_rows = row + gl.arange(0, ROWS, rows_layout)
        positions = length - queries + thread_rows // GROUP
        m_i = gl.full((ROWS,), float("-inf"), gl.float32, rows_layout)
        l_i = gl.zeros((ROWS,), gl.float32, rows_layout)
        accumulator = gl.zeros((ROWS, D), gl.float32, acc_layout)
        if low < high:
            zero_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, scores_layout)
            mbarrier.wait(k_full.index(k_slot), k_phase)
            key_tile = _tile(keys, k_slot, COPIES)
            scores = warpgroup_mma(q_tile, key_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            mbarrier.arrive(k_empty.index(k_slot))
            last_key = (positions - (high - 1) * BLOCK_N)[:, None]
            weights, m_i, l_i, acc_scale = attention.softmax(scores, m_i, l_i, scales, last_key, None, window, True)
            k_slot, k_phase = advance(k_slot, k_phase, keys)
            mbarrier.wait(k_full.index(k_slot), k_phase, pred=high - 1 > low)
            first_pos = length - queries + row // GROUP
            last_pos = length - queries + gl.minimum((row + ROWS - 1) // GROUP, queries - 1)
            diagonal_blocks, full_blocks, _ = attention.block_kinds(first_pos, last_pos, low, high, window, BLOCK_N)
            edges = (high - 1, high - 1 - diagonal_blocks, high - 1 - diagonal_blocks - full_blocks, low)
            state = (weights, acc_scale, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase)
            for kind in gl.static_range(3):
                if kind < 2 or window is not None:
                    state = _steps(
                        q_tile, memory, state, edges[kind], edges[kind + 1], low, positions, scales, window, kind != 1,
                        COPIES,
                    )  # fmt: skip
            weights, acc_scale, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase = state
            mbarrier.wait(v_full.index(v_slot), v_phase)
            accumulator = attention.rescaled(accumulator, acc_scale)
            weight_operand = attention.as_factor(weights, keys.dtype, accumulator)
            accumulator = warpgroup_mma(weight_operand, _tile(values, v_slot, COPIES), accumulator, is_async=True)
            accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
            mbarrier.arrive(v_empty.index(v_slot))
            v_slot, v_phase = advance(v_slot, v_phase, values)

        row_head = kv_head * GROUP + thread_rows % GROUP
        sink = gl.load(sinks + row_head, mask=thread_rows < queries * GROUP, other=0.0) if sinks is not None else None
        out_scale, natural_lse = attention.finished(m_i, l_i, sink)
        if lse is not None:
            row_token = (first_query + thread_rows // GROUP).to(gl.int64)
            gl.store(
                lse + row_token * lse_stride_t + row_head.to(gl.int64) * lse_stride_h,
                natural_lse,
                mask=thread_rows < queries * GROUP,
            )
        result = attention.rescaled(accumulator, out_scale)
        q_tile.store(result.to(out.dtype.element_ty))  # through the queries' memory, so that rows are stored whole
        result = q_tile.load(load_layout)
        gl.store(out + (token * out_stride_t + head * out_stride_h)[:, None] + dims[None, :], result, mask=row_mask)


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@gluon.jit(do_not_specialize=["B", "tiles", "window", "table_stride", "boxes"])
def pages_kernel(
    q, k, v, out, lse, sinks, table, lens, cu, B, H_kv, tiles, k_page, k_head, v_page, v_head, boxes, window, scale,
    stretch, cap, q_stride_t, q_stride_h, table_stride, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    HEAD_DIM: gl.constexpr, D: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NEGATED: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    swizzled_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(k.dtype, [2, ROWS, D], swizzled_layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], swizzled_layout)
    values = gl.allocate_shared_memory(k.dtype, [STAGES, BLOCK_N, D], swizzled_layout)
    k_full = new_barriers(STAGES, 1)  # a block's bytes have arrived
    k_empty = new_barriers(STAGES, 2)  # both consumers' products of the block are done
    v_full = new_barriers(STAGES + 1, 1)  # the last counts the bytes of a block that the producer then clears in part
    v_empty = new_barriers(STAGES, 2)
    fence_async_shared()
    shared_memory = (keys, values, k_full, k_empty, v_full, v_empty)
    tile_args = (cu, lens, B, H_kv, tiles, window)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h)
    consumer_args = ((q, out, lse, sinks), strides, (scale, stretch, cap), tile_args, queries, shared_memory)
    load_args = (k, v, table, table_stride, k_page, k_head, v_page, v_head, boxes)
    gl.warp_specialize(
        [
            (_consume, (consumer_args, HEAD_DIM, GROUP, NEGATED, COPIES, 0)),
            (_consume, (consumer_args, HEAD_DIM, GROUP, NEGATED, COPIES, 1)),
            (_produce, (load_args, tile_args, shared_memory, GROUP, BLOCK_SIZE, BOX, COPIES)),
        ],
        [4, 1],
        [240, 24],
    )


def bind(of: Arguments) -> tuple[Any, ...]:
    """Returns the arguments of a launch except the tensors: the grid, tensor maps, sizes and constants.  The grid has
    one CTA per SM, or one per possible tile if there are fewer tiles."""
    (T, H, D), B, (_, block_size, H_kv, _) = of.q.shape, len(of.seq_lens), of.k_cache.shape
    tiles, columns = tiles_at_most(T, B, H // H_kv, 2 * 64), attention.tile_columns(D)
    # A window of more keys than a table has room for hides nothing; the device uses 32 bits.
    window = None if of.window is None else min(of.window, of.block_table.shape[1] * block_size)
    box, full_rows = min(block_size, of.config.block_n), D % 64 == 0
    (keys, *k_steps), (values, *v_steps) = cache_map(of.k_cache, box, full_rows), cache_map(of.v_cache, box, full_rows)
    scalars = (
        B, H_kv, tiles, *k_steps, *v_steps, of.config.block_n // box, window,
        *attention.exponents(of),
        *of.q.stride()[:2], of.block_table.stride(0), *of.out.stride()[:2], *strides_of(of.lse, 2),
    )  # fmt: skip
    constants = {
        "HEAD_DIM": D,
        "D": columns,
        "GROUP": H // H_kv,
        "BLOCK_SIZE": block_size,
        "BOX": box,
        "NEGATED": (of.softmax_scale or 0) < 0,
        "COPIES": 1 if full_rows else columns // 64,
        "num_warps": 4,
        **of.config.launch_arguments,
    }
    return min(tiles * H_kv, sm_count(of.q.device)), keys, values, scalars, constants


@kernel(
    backend="gluon", min_sm=90, dtypes={"q": HALF_DTYPES}, limits={"D": range(8, 257, 8)},
    holds=pages_from(MIN_PAGE_TOKENS), whole={"k_cache": -1, "v_cache": -1},
    unsupported=why_too_far, traffic=traffic,
    bind=bind, tuning=TMA_PAGES_TUNING,
    over="chunked", shows={
        "B=4,context=4096,H=32,H_kv=8,D=128,block_size=16,ragged=false,queries=512": (
            'below.ctas > 132 == ctas and all(loop.cp_async for loop in below.loops if loop.wgmma); '
            'all(loop.LDL == loop.STL == loop.LDG == loop.UTMALDG == 0 for loop in loops if loop.wgmma == 16); '
            'all(re.fullmatch("product( rounding product)* wait1 exponential wait0", loop.order) for loop in loops '
            'if loop.wgmma == 16); '
            '[(loop.tma, loop.global_load) for loop in loops if loop.innermost and loop.tma] == [(4, 0), (4, 0)]'
        ),
    },
)  # fmt: skip
def tma_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    lse: Tensor | None, *,
    softmax_scale: float | None, cu_seqlens_q: Tensor | None, window: int | None, softcap: float | None,
    sinks: Tensor | None, return_lse: bool, config: PagesConfig, bound: Any,
) -> None:  # fmt: skip
    """Computes attention: a producer warp copies pages, two warpgroups compute 64 rows each.  The host never waits."""
    ctas, k_map, v_map, scalars, constants = bound
    pages_kernel[(ctas,)](
        q, k_map(k_cache), v_map(v_cache), out, lse, sinks, block_table, seq_lens, cu_seqlens_q, *scalars, **constants
    )
