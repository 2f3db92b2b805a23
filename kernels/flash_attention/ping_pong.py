"""Implements the kernel `ping_pong` in Gluon: FlashAttention-3 (Shah et al., arXiv 2407.08608).

One warp, the producer, loads queries, keys and values by TMA into ring buffers in shared memory. Two warpgroups are the
consumers. Each has 64 rows of queries and its own accumulator. They alternate: one computes exponentials while the
other uses the tensor cores. A consumer starts the scores of a block of keys, then the value product (softmax weights
times values) of the previous block. While this product runs, it computes the softmax of the new block.

Gluon has no named barriers, so each consumer has an mbarrier that tells it when to start. In each step, a consumer's
128 threads wait for one another five times (read in the PTX): before three mbarrier arrivals, before the wait for keys,
and at the head of the loop. With a head_dim of 64 there are three consumers, which do not alternate (see `_step`).

Ideas that were tried, predicted or not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rooflab.kernels._attention import nothing_seen, traffic
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib import attention_gluon as attention
from rooflab.kernels.lib.tma import HEADS_LAYOUT, advance, async_load, async_store, map_maker, new_barriers, reinterpret
from rooflab.kernels.takes import HALF_DTYPES, why_not_mapped
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

ROWS: gl.constexpr = attention.WARPGROUP_ROWS


@dataclass(frozen=True)
class PingPongConfig(LaunchConfig):
    """A config: the number of keys per block, the slots of each ring buffer, and the number of consumer warpgroups."""

    block_n: int
    stages: int
    consumers: int

    @property
    def block_m(self) -> int:
        """Returns the number of query rows per CTA."""
        return 64 * self.consumers


def configs(case: Case, scheme: Scheme = BF16) -> tuple[PingPongConfig, ...]:
    """Returns the configs to try.  They have two consumer warpgroups.  For a head_dim up to 64, some have three."""
    consumers = (2, 3) if attention.tile_columns(int(case["D"])) == 64 else (2,)
    return space(PingPongConfig, block_n=(64, 128), stages=(2, 3, 4, 5), consumers=consumers)(case)


def footprint(config: PingPongConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA.  Shared memory holds the queries and the ring buffers, and then the result.  If
    head_dim is above 128, the result reuses the memory of the queries."""
    B, T, H, D = (int(case[axis_name]) for axis_name in ("B", "T", "H", "D"))
    return attention.footprint(
        config.consumers,
        D,
        config.block_n,
        config.stages,
        rows=config.block_m * (1 if D > 128 else 2),
        barriers=3 * config.consumers + 4 * config.stages,
        ctas=min(cdiv(T, config.block_m) * B * H, HOPPER_SMS),
    )


# The widest block that consumers and two slots can hold, more slots if they are small; a guess, unmeasured.
DEFAULTS = Defaults(
    (
        ({"D": 64, "tiles": HOPPER_SMS}, PingPongConfig(128, 4, 2)),  # three consumers would have fewer CTAs
        ({"D": 64}, PingPongConfig(128, 4, 3)),
        ({"D": 128}, PingPongConfig(128, 2, 2)),
        ({"D": 256}, PingPongConfig(64, 2, 2)),
    ),
    lambda case, scheme: {"tiles": cdiv(int(case["T"]), 128) * int(case["B"]) * int(case["H"])},
)


# Device code.  Keys and values have a ring of slots each.  A slot is `full` when the producer's bytes have arrived, and
# `empty` when the products of all consumers have read it; a consumer's queries have one slot.  Two consumers pass
# `turn` to each other: its holder starts its two products of a step, then passes it on and computes its softmax.


@gluon.jit
def _tile(nth, order, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Returns the head and the first query row of tile number `nth` of this CTA, and the range of its key blocks. A
    tile without visible keys also gets one key block, so that the loops need no special case."""
    T, S, H, heads, tiles_m, heads_in_l2, window = order
    tile = attention.nth_tile(nth, gl.program_id(0), gl.num_programs(0))
    tile_m, head = attention.place(tile, tiles_m, heads, heads_in_l2, CAUSAL)
    row = tile_m * (CONSUMERS * ROWS)
    range_start = 0
    range_end = S
    if CAUSAL:
        range_end = min(S, row + CONSUMERS * ROWS + S - T)
        if window is not None:
            range_start = max(row + S - T + 1 - window, 0) // BLOCK_N
    return head, row, range_start, max(gl.cdiv(range_end, BLOCK_N), 1)


@gluon.jit
def _load(x, full, ring, slot, b, h, row):
    """Starts a TMA copy of rows of one head to slot `slot` of the buffer `ring`.  The mbarrier `full` completes when
    the data has arrived.  Rows past the end of the sequence become zeros, and their bytes count too."""
    mbarrier.expect(full.index(slot), x.block_type.nbytes)
    slot_view = reinterpret(ring.index(slot), x.dtype, x.block_type.shape, x.layout)
    async_load(x, [b, h, row, 0], full.index(slot), slot_view)


@gluon.jit
def _produce(loads, CAUSAL: gl.constexpr):
    """Runs the producer warp, which loads each tile of queries and its blocks of keys and values, the last block first.

    The values of a block are loaded one step after its keys. The queries are loaded after the first keys, because the
    previous tile may still use their memory."""
    q, k, v, group_size, tile_order, shared_memory = loads
    _, _, H, heads, tiles_m, _, _ = tile_order
    queries, keys, value_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = shared_memory
    CONSUMER_COUNT: gl.constexpr = queries.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    # A new barrier counts the phase before its first as complete: with a phase of 1 the first wait returns at once.
    k_slot, k_phase, v_slot, v_phase, q_phase = 0, 1, 0, 1, 1
    for tile_number in range(attention.count_tiles(tiles_m * heads, gl.program_id(0), gl.num_programs(0))):
        head, row, range_start, range_end = _tile(tile_number, tile_order, CONSUMER_COUNT, BLOCK_N, CAUSAL)
        b = head // H
        h = head % H
        for tile_step in range(range_end - range_start):
            first_key = (range_end - 1 - tile_step) * BLOCK_N
            mbarrier.wait(k_empty.index(k_slot), k_phase)  # all consumers' products have read the slot
            _load(k, k_full, keys, k_slot, b, h // group_size, first_key)
            k_slot, k_phase = advance(k_slot, k_phase, keys)
            if tile_step == 0:
                for consumer in gl.static_range(CONSUMER_COUNT):
                    mbarrier.wait(q_empty.index(consumer), q_phase)
                    _load(q, q_full, queries, consumer, b, h, row + consumer * ROWS)
            else:
                mbarrier.wait(v_empty.index(v_slot), v_phase)
                _load(v, v_full, value_tiles, v_slot, b, h // group_size, first_key + BLOCK_N)
                v_slot, v_phase = advance(v_slot, v_phase, value_tiles)
        mbarrier.wait(v_empty.index(v_slot), v_phase)
        _load(v, v_full, value_tiles, v_slot, b, h // group_size, range_start * BLOCK_N)
        v_slot, v_phase = advance(v_slot, v_phase, value_tiles)
        q_phase ^= 1


@gluon.jit
def _softmax(scores, m_i, l_i, first, row, order, scales, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """Updates the online softmax with the key block at `first`, for the queries from row `row` on."""
    T, S, _, _, _, _, window = order
    last_keys = (row + gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout)) + S - T - first)[:, None]
    return attention.softmax(scores, m_i, l_i, scales, last_keys if CAUSAL else None, S - 1 - first, window, MASKED)


@gluon.jit
def _step(
    q_tile, memory, state, first, begin, row, order, scales,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, NTH: gl.constexpr,
):  # fmt: skip
    """Runs one step of a consumer warpgroup.  The step computes the scores and the softmax of the key block at `first`.
    It also computes the value product (softmax weights times values) of the previous block.

    Two consumers alternate. Each computes its softmax while its value product runs, then waits for the other's signal.
    Three consumers do not alternate. Each waits for its own products before its softmax, while the other two use the
    tensor cores. A thread then has only 160 registers. No GPU has shown yet that the three overlap in this way."""
    weights, rescale_factor, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase, turn_phase = state
    queries, keys, value_tiles, _, _, k_full, k_empty, v_full, v_empty, turn_bars = memory
    TAKES_TURNS: gl.constexpr = queries.shape[0] == 2
    BLOCK_N: gl.constexpr = keys.shape[1]
    mma_layout: gl.constexpr = attention.product_layout(BLOCK_N)
    zero_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, mma_layout)
    if TAKES_TURNS:
        scores = warpgroup_mma(q_tile, keys.index(k_slot).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), v_phase)  # the values have arrived
    if TAKES_TURNS:
        accumulator = attention.rescaled(accumulator, rescale_factor)
    weight_tile = attention.as_factor(weights, keys.dtype, accumulator)
    accumulator = warpgroup_mma(weight_tile, value_tiles.index(v_slot), accumulator, is_async=True)
    if TAKES_TURNS:
        mbarrier.arrive(turn_bars.index(1 - NTH))  # both products are queued, so the other consumer may queue its own
        # The scores are done, and with them the reads of their keys; the value product may still run.
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_slot))
    else:
        scores = warpgroup_mma(q_tile, keys.index(k_slot).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        scores, accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(scores, accumulator))
        mbarrier.arrive(k_empty.index(k_slot))
        mbarrier.arrive(v_empty.index(v_slot))
    weights, m_i, l_i, rescale_factor = _softmax(scores, m_i, l_i, first, row, order, scales, CAUSAL, MASKED)
    if TAKES_TURNS:
        weights = attention.packed(weights, keys.dtype)
    else:
        accumulator = attention.rescaled(accumulator, rescale_factor)
    freed_slot = v_slot
    k_slot, k_phase = advance(k_slot, k_phase, keys)
    v_slot, v_phase = advance(v_slot, v_phase, value_tiles)
    # A wait for an mbarrier is a loop, and ptxas moves no wait for products over a loop.  So the wait for the value
    # product, below, stays behind the exponentials.  Without a loop here ptxas moved it before them.
    mbarrier.wait(k_full.index(k_slot), k_phase, pred=first > begin)
    if TAKES_TURNS:
        mbarrier.wait(turn_bars.index(NTH), turn_phase ^ 1, pred=first > begin)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(freed_slot))
    return weights, rescale_factor, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase, turn_phase ^ 1


@gluon.jit
def _store(results, T, b, h, row, staged, accumulator, m_i, l_i):
    """Divides the accumulator by the softmax sum, which includes the attention sink.  Stores the log-sum-exp, and the
    result by TMA. TMA skips rows past the end of the sequence."""
    out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride = results
    head_sink = gl.load(sinks + h * sinks_stride) if sinks is not None else None
    inverse_sum, lse_of_rows = attention.finished(m_i, l_i, head_sink)
    if lse is not None:
        rows = row + gl.arange(0, ROWS, m_i.type.layout)
        lse_base = lse + b.to(gl.int64) * lse_stride_b + h.to(gl.int64) * lse_stride_h
        gl.store(lse_base + rows.to(gl.int64) * lse_stride_t, lse_of_rows, mask=rows < T)
    staged.store(attention.rescaled(accumulator, inverse_sum).to(out.dtype))
    fence_async_shared()  # TMA reads what these threads stored
    async_store(out, [b, h, row, 0], reinterpret(staged, out.dtype, out.block_type.shape, out.layout))


@gluon.jit
def _consume(args, CAUSAL: gl.constexpr, NTH: gl.constexpr):
    """Runs a consumer warpgroup of the attention kernel.  It computes 64 query rows of each tile, from the last key
    block to the first."""
    result_args, order, scales, memory, out_buffer = args
    T, S, H, heads, tiles_m, _, window = order
    queries, keys, value_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn_bars = memory
    CONSUMER_COUNT: gl.constexpr = queries.shape[0]
    D: gl.constexpr = queries.shape[2]
    BLOCK_N: gl.constexpr = keys.shape[1]
    scores_layout: gl.constexpr = attention.product_layout(BLOCK_N)
    mma_layout: gl.constexpr = attention.product_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout)
    q_tile = queries.index(NTH)
    k_slot, k_phase, v_slot, v_phase, q_phase = 0, 0, 0, 0, 0
    turn_phase = 1 - NTH  # the first consumer begins
    for tile_number in range(attention.count_tiles(tiles_m * heads, gl.program_id(0), gl.num_programs(0))):
        head, row, range_start, range_end = _tile(tile_number, order, CONSUMER_COUNT, BLOCK_N, CAUSAL)
        row += NTH * ROWS
        last_key = row + S - T if CAUSAL else S - 1
        block_counts = attention.block_kinds(last_key, last_key + ROWS - 1, range_start, range_end, window, BLOCK_N)
        range_start *= BLOCK_N
        first = (range_end - 1) * BLOCK_N
        # The last block may have keys past the end, so it is masked; no weights are known yet for a value product.
        zero_scores = gl.zeros((ROWS, BLOCK_N), gl.float32, scores_layout)
        mbarrier.wait(q_full.index(NTH), q_phase)
        mbarrier.wait(k_full.index(k_slot), k_phase)
        scores = warpgroup_mma(q_tile, keys.index(k_slot).permute((1, 0)), zero_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
        mbarrier.arrive(k_empty.index(k_slot))
        m_i = gl.full((ROWS,), float("-inf"), gl.float32, rows)
        l_i = gl.zeros((ROWS,), gl.float32, rows)
        weights, m_i, l_i, rescale_factor = _softmax(scores, m_i, l_i, first, row, order, scales, CAUSAL, True)
        if CONSUMER_COUNT == 2:
            weights = attention.packed(weights, keys.dtype)
        accumulator = gl.zeros((ROWS, D), gl.float32, mma_layout)
        k_slot, k_phase = advance(k_slot, k_phase, keys)
        mbarrier.wait(k_full.index(k_slot), k_phase, pred=first > range_start)
        if CONSUMER_COUNT == 2:
            mbarrier.wait(turn_bars.index(NTH), turn_phase, pred=first > range_start)
        # One loop for each kind of block (cut by the diagonal, without a mask, cut by the window), so that the masks'
        # instructions are only where a mask is.
        state = (weights, rescale_factor, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase, turn_phase)
        for kind in gl.static_range(3):
            if kind == 1 or (CAUSAL and (kind == 0 or window is not None)):
                for _ in range(block_counts[kind]):
                    first -= BLOCK_N
                    state = _step(q_tile, memory, state, first, range_start, row, order, scales, CAUSAL, kind != 1, NTH)
        weights, rescale_factor, accumulator, m_i, l_i, k_slot, k_phase, v_slot, v_phase, turn_phase = state
        if D <= 128:
            mbarrier.arrive(q_empty.index(NTH))  # the last scores are done, so the next tile's queries may come
        mbarrier.wait(v_full.index(v_slot), v_phase)
        if CONSUMER_COUNT == 2:
            accumulator = attention.rescaled(accumulator, rescale_factor)
        weight_tile = attention.as_factor(weights, keys.dtype, accumulator)
        accumulator = warpgroup_mma(weight_tile, value_tiles.index(v_slot), accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(v_empty.index(v_slot))
        v_slot, v_phase = advance(v_slot, v_phase, value_tiles)
        q_phase ^= 1
        if D <= 128:
            tma.store_wait(pendings=0)  # TMA has read the data staged here before
        _store(result_args, T, head // H, head % H, row, out_buffer.index(NTH), accumulator, m_i, l_i)
        if D > 128:  # the result is staged over the queries: the next ones wait until TMA has read it
            tma.store_wait(pendings=0)
            mbarrier.arrive(q_empty.index(NTH))
    if D <= 128:
        tma.store_wait(pendings=0)  # the CTA's shared memory must live until TMA has read it


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@gluon.jit(do_not_specialize=["T", "S", "heads", "section", "window", "lse_stride_b"])
def _attention(
    q, k, v, out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride, T, S, H, group, heads, section,
    window, scale, stretch, cap,
    CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    swizzled_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, D], swizzled_layout)
    keys = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, D], swizzled_layout)
    value_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, BLOCK_N, D], swizzled_layout)
    out_buffer = queries
    if D <= 128:
        out_buffer = gl.allocate_shared_memory(q.dtype, [CONSUMERS, ROWS, D], swizzled_layout)
    q_full = new_barriers(CONSUMERS, 1)  # the queries' bytes have arrived
    q_empty = new_barriers(CONSUMERS, 1)  # the queries' consumer has read them for the last time
    k_full = new_barriers(STAGES, 1)  # a block's bytes have arrived
    k_empty = new_barriers(STAGES, CONSUMERS)  # every consumer's products of the block are done
    v_full = new_barriers(STAGES, 1)
    v_empty = new_barriers(STAGES, CONSUMERS)
    turn_bars = new_barriers(CONSUMERS, 1)  # the other consumer has started its products; three consumers do not use it
    fence_async_shared()  # the barriers exist before TMA completes one
    result_args = (out, lse, lse_stride_b, lse_stride_t, lse_stride_h, sinks, sinks_stride)
    tile_order = (T, S, H, heads, gl.cdiv(T, CONSUMERS * ROWS), section, window)
    shared_memory = (queries, keys, value_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn_bars)
    args = (result_args, tile_order, (scale, stretch, cap), shared_memory, out_buffer)
    load_args = (q, k, v, group, tile_order, shared_memory)
    # The first function runs on the kernel's own four warps; the lists give warps and registers to the others.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (args, CAUSAL, 0)), (_consume, (args, CAUSAL, 1)), (_produce, (load_args, CAUSAL))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (args, CAUSAL, 0)),
                (_consume, (args, CAUSAL, 1)),
                (_consume, (args, CAUSAL, 2)),
                (_produce, (load_args, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def _map(x: Tensor, rows: int) -> Any:
    """Returns a function that makes a tensor map of `x` `[B, T, H, D]` as `[B, H, T, D]`. A box has `rows` rows of one
    head. TMA needs strides that are multiples of 16 bytes. A dimension of size 1 gets the stride 16, which is never
    used."""
    B, T, H, D = x.shape
    strides = [x.stride(dim) if x.shape[dim] > 1 else 16 for dim in (0, 2, 1)]
    box_shape = [1, 1, rows, attention.tile_columns(D)]
    return map_maker(TensorDescriptor, [B, H, T, D], [*strides, 1], box_shape, HEADS_LAYOUT)


def bind(of: Arguments) -> tuple[Any, ...]:
    """Computes all launch arguments that are not tensors.  Raises `ValueError` if TMA cannot store the output."""
    if refusal_reason := why_not_mapped(of.out):
        raise ValueError(f"out: {refusal_reason}")
    (B, T, H, D), S, config = of.q.shape, of.k.shape[1], of.config
    heads, group_size = B * H, H // of.k.shape[2]
    lse_strides = (0, 0, 0) if of.lse is None else of.lse.stride()
    window = of.window if of.window is not None and of.window < S else None  # a wider window hides nothing
    return (
        min(cdiv(T, config.block_m) * heads, sm_count(of.q.device)),
        (_map(of.q, 64), _map(of.k, config.block_n), _map(of.v, config.block_n), _map(of.out, 64)),
        (
            *lse_strides, 0 if of.sinks is None else of.sinks.stride(0), T, S, H, group_size, heads,
            min(heads, attention.section_heads(of.k, group_size)), window, *attention.exponents(of),
        ),
        {"D": attention.tile_columns(D), "CAUSAL": of.causal, "num_warps": 4, **config.launch_arguments},
    )  # fmt: skip


@kernel(
    backend="gluon", min_sm=90, dtypes={"q": HALF_DTYPES}, limits={"D": range(8, 257, 8)},
    mapped={"q": -1, "k": -1, "v": -1}, traffic=traffic,
    holds={"softmax_scale is None or softmax_scale >= 0": "0 or more, as a masked score of -inf must stay the lowest"},
    tuning=Tuning(PingPongConfig, configs, DEFAULTS, footprint), bind=bind, empty=nothing_seen,
    over="online", shows={"": (
        r'not below.uses_warp_specialization and uses_warp_specialization and threads == 384; '
        r'all(loop.wgmma == 16 and loop.FSEL == loop.spill_load == loop.spill_store == 0 for loop in products[:2]); '
        r'all(re.fullmatch("product wait1( exponential| rounding)+ wait0", loop.order) for loop in products[:2])'
    )},
)  # fmt: skip
def ping_pong(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: PingPongConfig, bound: Any,
) -> None:  # fmt: skip
    """Computes attention: a producer warp loads, and two or three consumer warpgroups compute 64 rows each."""
    ctas, (q_map, k_map, v_map, out_map), scalars, constants = bound
    _attention[(ctas,)](q_map(q), k_map(k), v_map(v), out_map(out), lse, *scalars[:3], sinks, *scalars[3:], **constants)
