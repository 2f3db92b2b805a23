"""Implements the kernel `cooperative` in Gluon.  Each consumer warpgroup always has a matrix product in flight.

The kernel improves on `warp_specialized`.  One producer warp fills a ring buffer in shared memory by TMA, also while
the last tile is stored.  Two consumer warpgroups share a tile of B, and each multiplies half of the rows of A.  A
consumer frees a slot of the ring only after its next product has started, so the tensor cores never wait.

A slot has one barrier `full`, which completes when the data has arrived.  It has one barrier `empty` per consumer,
which completes when that consumer has read the slot.

The design is that of CUTLASS's cooperative warp-specialized GEMM (NVIDIA, CUTLASS 3.x, example 48) and of
ThunderKittens (Spector et al., 2024).  Gluon 3.6 has no multicast.  The kernel `multicast` adds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
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

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm import _operands
from rooflab.kernels.gemm._tiles import at_both_widths, outputs
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.tma import advance, async_load, async_store, new_barriers
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

THREADS = 384
"""Threads of a CTA: two consumers and the producer warp's warpgroup.  setmaxnreg moves registers between warpgroups."""
ADDRESS_REGISTERS, BARRIERS = 24, 3
"""Registers per thread besides the accumulators; barriers of a slot: a `full`, and an `empty` for each consumer."""
MIN_DEEP_K = 2048
"""From this K on, a fourth slot is predicted to gain more than staging a whole tile; not measured."""


@dataclass(frozen=True)
class Ring(LaunchConfig):
    """A config: the tile that two consumer warpgroups share, and the ring buffer that a producer warp fills."""

    block_m: int
    """The number of rows of a tile.  Each consumer takes half of the rows."""
    block_n: int
    block_k: int
    stages: int
    """The number of slots of the ring."""
    group_m: int
    """The number of row panels of tiles that share their columns of `b` in L2."""
    store_n: int
    """The columns of a finished tile that are staged at once: all columns, or half if the ring needs the memory."""


def ring_footprint(config: Any, columns: int, tiles: int, staged: int, case: Case, scheme: Scheme) -> Footprint:
    """Returns the resources of a CTA with one producer warp and two consumer warpgroups, at most one CTA per SM.

    The kernel computes `tiles` tiles of `columns` columns.  Shared memory holds the ring buffer, its barriers, and
    `staged` values of the result."""
    shared_values, block_k = config.stages * (config.block_m + columns) * config.block_k + staged, config.block_k
    ctas, outputs = min(tiles, HOPPER_SMS), config.block_m * columns
    return Footprint(
        threads=THREADS,
        registers=outputs // (2 * 128) + ADDRESS_REGISTERS,
        shared_bytes=shared_values * scheme.activation.itemsize + config.stages * BARRIERS * 8,
        ctas=ctas,
        tensor_flops=2.0 * outputs * cdiv(int(case["K"]), block_k) * block_k * tiles / max(1, ctas),
    )


def footprint(config: Ring, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources.  Shared memory holds the ring buffer, and part of a finished tile before its store."""
    tiles = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    return ring_footprint(config, config.block_n, tiles, config.block_m * config.store_n, case, scheme)


def rule(config: Ring, case: Case, scheme: Scheme = BF16) -> bool:
    """Returns whether a config is legal: a tile has 64 or 128 bytes along K, and is stored at once or in two halves."""
    store_widths, k_bytes = (config.block_n, config.block_n // 2), config.block_k * scheme.activation.itemsize
    return k_bytes in (64, 128) and config.store_n in store_widths


def sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns two values that select a default config: `outputs` and `halves`.

    `outputs` is the number of elements of the result.  `halves` is 1 if a tile should be stored in two halves, which
    saves shared memory.  This needs a K of at least 2048 (`MIN_DEEP_K`), and no residual."""
    return {**outputs(case, scheme), "halves": int(int(case["K"]) >= MIN_DEEP_K and not case.get("residual"))}


# Unmeasured.  Few outputs take narrow tiles, so that more SMs have one; the most slots that fit, fewer in 32 bits.
_TILE64, _TILE256 = Ring(128, 64, 64, 8, 16, 64), Ring(128, 256, 64, 3, 16, 256)
_MIDDLE = tuple(Ring(128, 128, 64, stages, 16, 128) for stages in (6, 5))
_IN_HALVES = tuple(Ring(128, 256, 64, stages, 16, 128) for stages in (4, 3))
TUNING = Tuning(
    Ring,
    space(
        Ring, block_m=(128, 256), block_n=(64, 128, 256), block_k=(16, 32, 64), stages=(3, 4, 6, 8), group_m=(8, 16),
        store_n=(32, 64, 128, 256),
    ),
    Defaults(at_both_widths(
        ({"M": 256, "N": 6144}, _TILE64), ({"M": 256, "halves": 0}, _TILE256), ({"M": 256}, _IN_HALVES),
        ({"outputs": 524288}, _TILE64), ({"outputs": 2097152}, _MIDDLE), ({"halves": 0}, _TILE256), ({}, _IN_HALVES),
    ), sizes), footprint, rule,
)  # fmt: skip


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    tile = tile.to(gl.uint32)  # an unsigned division takes fewer instructions
    group_tiles = (GROUP_M * tiles_n).to(gl.uint32)
    first_m = (tile // group_tiles).to(gl.int32) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M).to(gl.uint32)
    index_in_group = tile % group_tiles
    return first_m + (index_in_group % group_m).to(gl.int32), (index_in_group // group_m).to(gl.int32)


@gluon.jit
def _produce(
    a,
    b,
    tiles_m,
    tiles_n,
    steps,
    a_ring,
    b_ring,
    full,
    empty,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr,
):
    slot = 0
    ring_phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        column = tile_n * BLOCK_N
        for k_step in range(steps):
            k = k_step * BLOCK_K
            for half_id in gl.static_range(2):
                mbarrier.wait(empty.index(2 * slot + half_id), ring_phase)
            full_barrier = full.index(slot)
            mbarrier.expect(full_barrier, 2 * a.block_type.nbytes + b.block_type.nbytes)
            for half_id in gl.static_range(2):
                row = tile_m * BLOCK_M + half_id * (BLOCK_M // 2)
                if A_TRANSPOSED:
                    async_load(a, [k, row], full_barrier, a_ring.index(2 * slot + half_id))
                else:
                    async_load(a, [row, k], full_barrier, a_ring.index(2 * slot + half_id))
            if B_TRANSPOSED:
                async_load(b, [column, k], full_barrier, b_ring.index(slot))
            else:
                async_load(b, [k, column], full_barrier, b_ring.index(slot))
            slot, ring_phase = advance(slot, ring_phase, full)


@gluon.jit
def _fetch(residual, staged, landed, row, column):
    tma.store_wait(pendings=0)  # TMA has read the tile staged here before
    mbarrier.expect(landed, residual.block_type.nbytes)
    async_load(residual, [row, column], landed, staged)


@gluon.jit
def _await(landed, landing, HAS_RESIDUAL: gl.constexpr):
    """Waits until TMA has loaded the residual tile.  If there is no residual, waits until TMA has stored the previous
    output tile."""
    if HAS_RESIDUAL:
        mbarrier.wait(landed, landing)
    else:
        tma.store_wait(pendings=0)


@gluon.jit
def _store(out, part, staged, row, column, HAS_RESIDUAL: gl.constexpr):
    if HAS_RESIDUAL:
        part += staged.load(part.type.layout).to(gl.float32)
    staged.store(part.to(out.dtype))
    fence_async_shared()
    async_store(out, [row, column], staged)


@gluon.jit
def _consume(
    out, residual, bias, N, tiles_m, tiles_n, steps, a_ring, b_ring, full, empty, staged, landed,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STORE_N: gl.constexpr,
    A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    HAS_RESIDUAL: gl.constexpr = residual is not None
    HALF_ROWS: gl.constexpr = BLOCK_M // 2
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // a_ring.dtype.primitive_bitwidth]
    )
    # Zeros only for the type: the first product of each tile replaces the accumulator.
    accumulator = gl.zeros((HALF_ROWS, BLOCK_N), gl.float32, mma_layout)
    slot = 0
    ring_phase = 0
    residual_phase = 0
    last_tile = tiles_m * tiles_n - 1
    tile_m, tile_n = _place(min(gl.program_id(0), last_tile), tiles_m, tiles_n, GROUP_M)
    for tile in range(gl.program_id(0), last_tile + 1, gl.num_programs(0)):
        row = tile_m * BLOCK_M + HALF * HALF_ROWS
        column = tile_n * BLOCK_N
        if HAS_RESIDUAL:
            _fetch(residual, staged, landed, row, column)
        prior_slot = 0  # as `slot` it would not be carried from step to step (Triton 3.6: the two are one value then)
        for k_step in range(steps):
            mbarrier.wait(full.index(slot), ring_phase)
            a_tile = a_ring.index(2 * slot + HALF)
            b_tile = b_ring.index(slot)
            if A_TRANSPOSED:
                a_tile = a_tile.permute((1, 0))
            if B_TRANSPOSED:
                b_tile = b_tile.permute((1, 0))
            accumulator = warpgroup_mma(a_tile, b_tile, accumulator, use_acc=k_step > 0, is_async=True)
            # One product stays in flight; the product before it is done and its slot is free.
            accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(accumulator,))
            mbarrier.arrive(empty.index(2 * prior_slot + HALF), pred=k_step > 0)
            prior_slot = slot
            slot, ring_phase = advance(slot, ring_phase, full)
        # While the last product runs: all that does not need it.
        tile_m, tile_n = _place(min(tile + gl.num_programs(0), last_tile), tiles_m, tiles_n, GROUP_M)
        if bias is not None:
            columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma_layout))
            bias_values = gl.load(bias + columns, mask=columns < N, other=0.0)
        _await(landed, residual_phase, HAS_RESIDUAL)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index(2 * prior_slot + HALF))
        final_sums = accumulator
        if bias is not None:
            final_sums += bias_values.to(gl.float32)[None, :]
        if STORE_N == BLOCK_N:
            _store(out, final_sums, staged, row, column, HAS_RESIDUAL)
            residual_phase ^= 1
        else:
            first_half, second_half = final_sums.reshape((HALF_ROWS, 2, STORE_N)).permute((0, 2, 1)).split()
            _store(out, first_half, staged, row, column, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                _fetch(residual, staged, landed, row, column + STORE_N)
            _await(landed, 1, HAS_RESIDUAL)
            _store(out, second_half, staged, row, column + STORE_N, HAS_RESIDUAL)
    tma.store_wait(pendings=0)  # the CTA's shared memory must live until TMA has read it


@gluon.jit
def _gemm(
    a, b, bias, residual, out, M, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STORE_N: gl.constexpr, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    out_buffers = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    full_bars = new_barriers(STAGES, 1)
    empty_bars = new_barriers(2 * STAGES, 1)
    residual_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half_id in gl.static_range(0 if residual is None else 2):
        mbarrier.init(residual_bars.index(half_id), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, residual, bias, N, tiles_m, tiles_n, steps, a_ring, b_ring, full_bars, empty_bars,
                        out_buffers.index(0), residual_bars.index(0), BLOCK_M, BLOCK_N, GROUP_M, STORE_N, A_TRANSPOSED,
                        B_TRANSPOSED, 0)),
            (_consume, (out, residual, bias, N, tiles_m, tiles_n, steps, a_ring, b_ring, full_bars, empty_bars,
                        out_buffers.index(1), residual_bars.index(1), BLOCK_M, BLOCK_N, GROUP_M, STORE_N, A_TRANSPOSED,
                        B_TRANSPOSED, 1)),
            (_produce, (a, b, tiles_m, tiles_n, steps, a_ring, b_ring, full_bars, empty_bars, BLOCK_M, BLOCK_N, BLOCK_K,
                        GROUP_M, A_TRANSPOSED, B_TRANSPOSED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def by_maps(of: Arguments) -> Any:
    """Computes the launch arguments of a call from its shapes, strides and options.  Returns the functions that make
    the TMA maps, and then the grid, the sizes (M, N, K) and the constants."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    (a, b), c = _operands.stored_operands(of.a, of.b), _operands.stored_output(of.c)
    residual = None if of.residual is None else _operands.stored_as(of.residual, False)
    half_rows = config.block_m // 2
    grid = (min(cdiv(M, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    tensor_maps = [
        matrix and matrix.map(rows, columns, of.a.dtype)
        for matrix, rows, columns in (
            (a, half_rows, config.block_k),
            (b, config.block_k, config.block_n),
            (c, half_rows, config.store_n),
            (residual, half_rows, config.store_n),
        )
    ]
    transpose_flags = {"A_TRANSPOSED": a.transposed, "B_TRANSPOSED": b.transposed}
    return *tensor_maps, grid, (M, N, K), {**transpose_flags, "num_warps": 4, **config.launch_arguments}


@kernel(
    backend="gluon",
    min_sm=90,
    aligned=("a", "b", "residual"),
    empty=_operands.epilogue_alone,
    bind=by_maps,
    unsupported=partial(_operands.why_not_by_tma, stores=True, residual=True),
    traffic=_operands.tiles_traffic,
    tuning=TUNING,
    over="warp_specialized",
    shows={
        "": (
            r'below.in_ptx(r"wait_group\.sync\.aligned 0") and not below.in_ptx(r"wait_group\.sync\.aligned [1-9]"); '
            r'in_ptx(r"wait_group\.sync\.aligned 1") == in_ptx(r"wait_group\.sync\.aligned 0") == 2; '
            r"loop.wgmma > 0 and loop.global_load == loop.shared_load == loop.spill_load == 0; "
            r'threads == 384 and stack_bytes == 0 and in_ptx("setmaxnreg") and len(products) == 2'
        )
    },
)
def cooperative(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: Ring,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` on Hopper's tensor cores, accumulated in fp32 and rounded once."""
    a_map, b_map, c_map, residual_map, grid, size_args, constexpr_args = bound
    mapped_residual = None if residual is None else residual_map(residual)
    _gemm[grid](a_map(a), b_map(b), bias, mapped_residual, c_map(c), *size_args, **constexpr_args)
