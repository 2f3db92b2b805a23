"""Implements the kernel `cooperative`.  CTAs are persistent; one warp loads, and two warpgroups multiply.

The kernel improves on `tma`.  The producer warp loads the next tile, of any expert, while the last tile is stored.  Two
consumer warpgroups share a tile of B, and each has half of the tile's rows.  A half without rows of the expert is
skipped.  So the last tile of an expert is padded to 64 rows, not 128.

The kernel itself counts the tiles, because the host does not read the offsets.  It keeps the counts in registers, and
two reductions find a tile's expert.

The ring buffer is as in gemm/cooperative.py.  CUTLASS's grouped GEMM (NVIDIA, "CUTLASS 3.x", example 57) and DeepGEMM's
grouped layouts (DeepSeek, 2025) pad each expert to complete tiles.
"""

from __future__ import annotations

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

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._operands import stored_operands, stored_output, why_not_by_tma
from rooflab.kernels.gemm._tiles import at_both_widths
from rooflab.kernels.gemm.cooperative import Ring, ring_footprint
from rooflab.kernels.gemm_grouped._configs import panels, sizes, tile_count
from rooflab.kernels.gemm_grouped._operands import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.tma import advance, async_load, async_store, new_barriers
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme

MIN_EXPERTS_AT_ONCE = 32
"""The least number of experts that are looked up together: one per thread of a warp."""


def footprint(config: Ring, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources.  Shared memory holds the ring buffer, and part of a finished tile before its store."""
    staged_values, tiles = config.block_m * config.store_n, tile_count(config, case)
    return ring_footprint(config, config.block_n, tiles, staged_values, case, scheme)


def rule(config: Ring, case: Case, scheme: Scheme = BF16) -> bool:
    """Returns whether a config is legal: `store_n` must be `block_n` or half of it.  `store_n` is the number of columns
    of a finished tile that are copied to shared memory at once."""
    return config.store_n in (config.block_n, config.block_n // 2)


# Unmeasured.
_TILE256, _TILE128, _TILE64 = Ring(128, 256, 64, 4, 8, 128), Ring(128, 128, 64, 6, 8, 128), Ring(128, 64, 64, 8, 8, 64)
TUNING = Tuning(
    Ring,
    space(
        Ring, block_m=(128, 256), block_n=(32, 64, 128, 256), block_k=(32, 64), stages=(3, 4, 6, 8),
        group_m=(4, 8, 16), store_n=(32, 64, 128, 256),
    ),
    Defaults(at_both_widths(
        ({"outputs": 524288, "columns": 6144}, _TILE64), ({"T": 16, "E": 1}, _TILE256), ({"T": 8, "N": 2048}, _TILE128),
        ({"K": 4096, "rows": 128}, _TILE256), ({"T": 2}, _TILE64), ({"T": 128}, _TILE256), ({"N": 3072}, _TILE128),
        ({}, (_TILE256, _TILE64)),
    ), sizes), footprint, rule,
)  # fmt: skip


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _panels(offsets, E, BLOCK_M: gl.constexpr, BLOCK_E: gl.constexpr, WARPS: gl.constexpr):
    """Returns a running sum over the experts: the number of row panels of each expert and all earlier experts.  A row
    panel is one row of tiles."""
    experts_per_thread: gl.constexpr = BLOCK_E // (32 * WARPS) if BLOCK_E > 32 * WARPS else 1
    expert_layout: gl.constexpr = gl.BlockedLayout([experts_per_thread], [32], [WARPS], [0])
    expert_ids = gl.arange(0, BLOCK_E, expert_layout)
    expert_starts = gl.load(offsets + expert_ids, mask=expert_ids < E, other=0)
    expert_ends = gl.load(offsets + expert_ids + 1, mask=expert_ids < E, other=0)
    return gl.associative_scan((expert_ends - expert_starts + BLOCK_M - 1) // BLOCK_M, 0, _add)


@gluon.jit
def _find(tile, panels, offsets, tiles_n, BLOCK_M: gl.constexpr, GROUP_M: gl.constexpr):
    """Returns the position of an output tile: its expert, its first row, the end of the expert's rows, and the column
    in tiles."""
    is_earlier_expert = panels * tiles_n <= tile
    expert = gl.sum(is_earlier_expert.to(gl.int32), 0)
    expert_tile = tile - gl.max(gl.where(is_earlier_expert, panels, 0), 0) * tiles_n
    expert_start = gl.load(offsets + expert)
    expert_end = gl.load(offsets + expert + 1)
    group_tiles = GROUP_M * tiles_n
    first_m = expert_tile // group_tiles * GROUP_M
    group_panels = min(gl.cdiv(expert_end - expert_start, BLOCK_M) - first_m, GROUP_M)
    tile_m = first_m + expert_tile % group_tiles % group_panels
    return expert, expert_start + tile_m * BLOCK_M, expert_end, expert_tile % group_tiles // group_panels


@gluon.jit
def _produce(
    a, b, offsets, E, N, tiles_n, steps, a_ring, b_ring, full, empty,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    panel_ends = _panels(offsets, E, BLOCK_M, BLOCK_E, 1)
    ring_slot = 0
    ring_phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    for tile in range(gl.program_id(0), gl.max(panel_ends, 0) * tiles_n, gl.num_programs(0)):
        expert, row, expert_end, tile_n = _find(tile, panel_ends, offsets, tiles_n, BLOCK_M, GROUP_M)
        has_both_halves = row + BLOCK_M // 2 < expert_end
        column = expert * N + tile_n * BLOCK_N
        for k_step in range(steps):
            mbarrier.wait(empty.index(2 * ring_slot), ring_phase)
            mbarrier.wait(empty.index(2 * ring_slot + 1), ring_phase)
            full_barrier = full.index(ring_slot)
            k = k_step * BLOCK_K
            if has_both_halves:
                mbarrier.expect(full_barrier, 2 * a.block_type.nbytes + b.block_type.nbytes)
                async_load(a, [row + BLOCK_M // 2, k], full_barrier, a_ring.index(2 * ring_slot + 1))
            else:
                mbarrier.expect(full_barrier, a.block_type.nbytes + b.block_type.nbytes)
            async_load(a, [row, k], full_barrier, a_ring.index(2 * ring_slot))
            async_load(b, [column, k], full_barrier, b_ring.index(ring_slot))
            ring_slot, ring_phase = advance(ring_slot, ring_phase, full)


@gluon.jit
def _store(out_map, out_ptr, stride_ot, part, staged, row, end, column, N):
    """Stores some columns of an output tile.  Uses TMA if all rows belong to the tile's expert.  Otherwise stores only
    the expert's rows, by pointers."""
    PART_ROWS: gl.constexpr = part.shape[0]
    PART_COLUMNS: gl.constexpr = part.shape[1]
    item_bytes: gl.constexpr = part.dtype.primitive_bitwidth // 8
    row_vectors: gl.constexpr = PART_COLUMNS * item_bytes // 16
    row_layout: gl.constexpr = gl.BlockedLayout([1, 16 // item_bytes], [32 // row_vectors, row_vectors], [4, 1], [1, 0])
    tma.store_wait(pendings=0)  # TMA has read the data staged here before
    staged.store(part)
    if row + PART_ROWS <= end:
        fence_async_shared()
        async_store(out_map, [row, column], staged)
    else:
        # int64, because row * stride passes 2**31 from T * N = 2**31 on.
        rows = row + gl.arange(0, PART_ROWS, gl.SliceLayout(1, row_layout))
        columns = column + gl.arange(0, PART_COLUMNS, gl.SliceLayout(0, row_layout))
        out_ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_ot + columns[None, :]
        gl.store(out_ptrs, staged.load(row_layout), mask=(rows < end)[:, None] & (columns < N)[None, :])


@gluon.jit
def _consume(
    out_map, out_ptr, stride_ot, offsets, E, N, tiles_n, steps, a_ring, b_ring, full, empty, staged,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STORE_N: gl.constexpr,
    BLOCK_E: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    HALF_ROWS: gl.constexpr = BLOCK_M // 2
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 256 // a_ring.dtype.primitive_bitwidth]
    )
    # Zeros only for the type: the first product of each tile replaces the accumulator.
    accumulator = gl.zeros((HALF_ROWS, BLOCK_N), gl.float32, mma_layout)
    panel_ends = _panels(offsets, E, BLOCK_M, BLOCK_E, 4)
    tiles = gl.max(panel_ends, 0) * tiles_n
    ring_slot = 0
    ring_phase = 0
    previous_slot = 0
    _, row, expert_end, tile_n = _find(min(gl.program_id(0), tiles - 1), panel_ends, offsets, tiles_n, BLOCK_M, GROUP_M)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # Nothing is loaded for a half of the tile without rows of the expert.
        consumer_steps = gl.where(row + HALF * HALF_ROWS < expert_end, steps, 0)
        for k_step in range(consumer_steps):
            mbarrier.wait(full.index(ring_slot), ring_phase)
            a_tile = a_ring.index(2 * ring_slot + HALF)
            b_tile = b_ring.index(ring_slot).permute((1, 0))
            accumulator = warpgroup_mma(a_tile, b_tile, accumulator, use_acc=k_step > 0, is_async=True)
            # One product stays in flight; the product before it is done and its slot is free.
            accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(accumulator,))
            mbarrier.arrive(empty.index(2 * previous_slot + HALF), pred=k_step > 0)
            previous_slot = ring_slot
            ring_slot, ring_phase = advance(ring_slot, ring_phase, full)
        next_tile = min(tile + gl.num_programs(0), tiles - 1)
        _, next_row, next_expert_end, next_tile_n = _find(next_tile, panel_ends, offsets, tiles_n, BLOCK_M, GROUP_M)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index(2 * previous_slot + HALF), pred=consumer_steps > 0)
        for _ in range(consumer_steps, steps):
            mbarrier.wait(full.index(ring_slot), ring_phase)
            mbarrier.arrive(empty.index(2 * ring_slot + HALF))
            ring_slot, ring_phase = advance(ring_slot, ring_phase, full)
        if consumer_steps > 0:
            rounded_tile = accumulator.to(out_map.dtype)
            first_row = row + HALF * HALF_ROWS
            column = tile_n * BLOCK_N
            if STORE_N == BLOCK_N:
                _store(out_map, out_ptr, stride_ot, rounded_tile, staged, first_row, expert_end, column, N)
            else:
                left_part, right_part = rounded_tile.reshape((HALF_ROWS, 2, STORE_N)).permute((0, 2, 1)).split()
                _store(out_map, out_ptr, stride_ot, left_part, staged, first_row, expert_end, column, N)
                _store(out_map, out_ptr, stride_ot, right_part, staged, first_row, expert_end, column + STORE_N, N)
        row, expert_end, tile_n = next_row, next_expert_end, next_tile_n
    tma.store_wait(pendings=0)  # the CTA's shared memory must live until TMA has read it


@gluon.jit
def _gemm(
    a, b, offsets, out_map, out_ptr, stride_ot, E, N, K,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    STORE_N: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    out_buffers = gl.allocate_shared_memory(out_map.dtype, [2] + out_map.block_type.shape, out_map.layout)
    full = new_barriers(STAGES, 1)
    empty = new_barriers(2 * STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out_map, out_ptr, stride_ot, offsets, E, N, tiles_n, steps, a_ring, b_ring, full, empty,
                        out_buffers.index(0), BLOCK_M, BLOCK_N, GROUP_M, STORE_N, BLOCK_E, 0)),
            (_consume, (out_map, out_ptr, stride_ot, offsets, E, N, tiles_n, steps, a_ring, b_ring, full, empty,
                        out_buffers.index(1), BLOCK_M, BLOCK_N, GROUP_M, STORE_N, BLOCK_E, 1)),
            (_produce, (a, b, offsets, E, N, tiles_n, steps, a_ring, b_ring, full, empty, BLOCK_M, BLOCK_N, BLOCK_K,
                        GROUP_M, BLOCK_E)),
        ],
        [4, 1],
        [232, 40],  # the producer holds the experts' panels: four per thread for 128 experts
    )  # fmt: skip


def by_maps(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  Raises `ValueError` if TMA cannot store `out`."""
    (T, K), (E, _, N), config = of.a.shape, of.b.shape, of.config
    (a, expert), out = stored_operands(of.a, of.b), stored_output(of.out)
    all_experts, half_m = expert._replace(rows=E * N, transposed=False), config.block_m // 2
    map_args = (a, half_m, config.block_k), (all_experts, config.block_n, config.block_k), (out, half_m, config.store_n)
    tensor_maps = [matrix.map(rows, columns, of.a.dtype) for matrix, rows, columns in map_args]
    grid = (min(panels(T, E, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    experts_at_once = max(MIN_EXPERTS_AT_ONCE, next_power_of_2(E))
    constexpr_args = {"BLOCK_E": experts_at_once, "num_warps": 4, **config.launch_arguments}
    return *tensor_maps, grid, (of.out.stride(0), E, N, K), constexpr_args


@kernel(
    backend="gluon",
    min_sm=90,
    dtypes={"a": HALF_DTYPES},
    unsupported=partial(why_not_by_tma, stores=True),
    aligned=("a", "b"),
    empty=lambda of: of.out.zero_(),
    bind=by_maps,
    traffic=traffic,
    tuning=TUNING,
    over="tma",
    shows={
        "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0": (
            "below.grid[0] > 132 == grid[0] and loop.wgmma == 4; "
            "not below.uses_warp_specialization and uses_warp_specialization; "
            'threads == 384 and in_ptx("setmaxnreg") and stack_bytes == 0; '
            "loop.wgmma > loop.tma == loop.shared_load == loop.shared_store == 0; "
            'in_ptx("cp.async.bulk.tensor.2d.global.shared") and global_store > 0'
        )
    },
)
def cooperative(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, config: Ring, bound: Any) -> None:
    """Multiplies each expert's rows by the expert's matrix on Hopper's tensor cores.  Sums in fp32, rounded once."""
    a_map, b_map, out_map, grid, scalar_args, constexpr_args = bound
    _gemm[grid](a_map(a), b_map(b), offsets, out_map(out), out, *scalar_args, **constexpr_args)
