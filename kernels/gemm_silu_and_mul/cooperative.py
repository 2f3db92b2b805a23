"""Implements the kernel `cooperative`.  One warp only loads; two warpgroups multiply and apply the activation.

The kernel improves on `persistent`.  The producer warp loads the next tile while the last tile is activated and stored.
The two consumer warpgroups share the tile of gate and up, and each has half of the rows of A.  gemm/cooperative.py
describes the design and names its sources.
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

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import stored_operands, stored_output
from rooflab.kernels.gemm._tiles import at_both_widths
from rooflab.kernels.gemm.cooperative import ring_footprint
from rooflab.kernels.gemm_silu_and_mul._configs import tile_count
from rooflab.kernels.gemm_silu_and_mul._maps import traffic, why_no_maps
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.tma import advance, async_load, async_store, new_barriers, reinterpret
from rooflab.kernels.takes import HALF_DTYPES
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme


@dataclass(frozen=True)
class PairRing(LaunchConfig):
    """A config: a tile with columns of gate and of up, and the ring buffer that a producer warp fills."""

    block_m: int
    """The number of rows of a tile.  Each consumer takes half of the rows."""
    block_i: int
    """The number of columns of gate in a tile.  The tile has as many columns of up."""
    block_k: int
    stages: int
    """The number of slots of the ring."""
    group_m: int = 16
    """The number of row panels of tiles that share their columns of `b` in L2."""


def footprint(config: PairRing, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources.  Shared memory holds the ring buffer, and a finished tile before its store."""
    staged_values, tiles = config.block_m * config.block_i, tile_count(config, case)
    return ring_footprint(config, 2 * config.block_i, tiles, staged_values, case, scheme)


# By the rows of a and the columns of gate; unmeasured.
TUNING = Tuning(
    PairRing,
    space(
        PairRing, block_m=(128, 256), block_i=(32, 64, 128), block_k=(32, 64), stages=(3, 4, 6, 8), group_m=(4, 8, 16)
    ),
    Defaults(
        at_both_widths(
            ({"M": 256, "I": 3072}, PairRing(128, 32, 64, 8)),
            ({"M": 256}, PairRing(128, 128, 64, 4)),
            ({"I": 1536}, PairRing(128, 64, 64, 6)),
            ({}, (PairRing(128, 128, 64, 4), PairRing(128, 64, 64, 6))),
        )
    ),
    footprint,
)


@gluon.jit
def _place(tile, tiles_m, tiles_i, GROUP_M: gl.constexpr):
    group_tiles = GROUP_M * tiles_i
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_tiles % group_m, tile % group_tiles // group_m


@gluon.jit
def _produce(
    a,
    b,
    I,
    tiles_m,
    tiles_i,
    steps,
    a_ring,
    b_ring,
    full,
    empty,
    BLOCK_M: gl.constexpr,
    BLOCK_I: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    ring_slot = 0
    ring_phase = 1  # a new barrier counts the phase before its first as complete, so the first wait returns at once
    for tile in range(gl.program_id(0), tiles_m * tiles_i, gl.num_programs(0)):
        tile_m, tile_i = _place(tile, tiles_m, tiles_i, GROUP_M)
        for k_step in range(steps):
            mbarrier.wait(empty.index(2 * ring_slot), ring_phase)
            mbarrier.wait(empty.index(2 * ring_slot + 1), ring_phase)
            full_barrier = full.index(ring_slot)
            mbarrier.expect(full_barrier, 2 * a.block_type.nbytes + 2 * b.block_type.nbytes)
            for half_id in gl.static_range(2):
                row = tile_m * BLOCK_M + half_id * (BLOCK_M // 2)
                column = tile_i * BLOCK_I + half_id * I  # columns of gate, then the same columns of up
                async_load(a, [row, k_step * BLOCK_K], full_barrier, a_ring.index(2 * ring_slot + half_id))
                async_load(b, [column, k_step * BLOCK_K], full_barrier, b_ring.index(2 * ring_slot + half_id))
            ring_slot, ring_phase = advance(ring_slot, ring_phase, full)


@gluon.jit
def _silu_product(accumulator, kind: gl.constexpr):
    """Returns `silu(gate) * up` in the dtype `kind`.  The tile holds `gate` in its left half and `up` in its right
    half. A thread holds both values of a position."""
    rows: gl.constexpr = accumulator.shape[0]
    half_columns: gl.constexpr = accumulator.shape[1] // 2
    gate, up = accumulator.reshape((rows, 2, half_columns)).permute((0, 2, 1)).split()
    exp_minus_abs = gl.exp(-gl.abs(gate))  # exp(-|gate|) cannot overflow
    product_tile = (gl.where(gate >= 0.0, gate, gate * exp_minus_abs) / (1.0 + exp_minus_abs) * up).to(kind)
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, half_columns, 256 // kind.primitive_bitwidth]
    )
    return gl.convert_layout(product_tile, mma_layout)


@gluon.jit
def _consume(
    out,
    tiles_m,
    tiles_i,
    steps,
    a_ring,
    b_ring,
    full,
    empty,
    staged,
    BLOCK_M: gl.constexpr,
    BLOCK_I: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    HALF: gl.constexpr,
):
    HALF_ROWS: gl.constexpr = BLOCK_M // 2
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BLOCK_I, 256 // a_ring.dtype.primitive_bitwidth]
    )
    gate_up_ring = reinterpret(b_ring, b_ring.dtype, [STAGES, 2 * BLOCK_I, BLOCK_K], b_ring.layout)
    # Zeros only for the type: the first product of each tile replaces the accumulator.
    accumulator = gl.zeros((HALF_ROWS, 2 * BLOCK_I), gl.float32, mma_layout)
    ring_slot = 0
    ring_phase = 0
    previous_slot = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_i, gl.num_programs(0)):
        tile_m, tile_i = _place(tile, tiles_m, tiles_i, GROUP_M)
        for k_step in range(steps):
            mbarrier.wait(full.index(ring_slot), ring_phase)
            a_tile = a_ring.index(2 * ring_slot + HALF)
            b_tile = gate_up_ring.index(ring_slot).permute((1, 0))
            accumulator = warpgroup_mma(a_tile, b_tile, accumulator, use_acc=k_step > 0, is_async=True)
            # One product stays in flight; the product before it is done and its slot is free.
            accumulator = warpgroup_mma_wait(num_outstanding=1, deps=(accumulator,))
            mbarrier.arrive(empty.index(2 * previous_slot + HALF), pred=k_step > 0)
            previous_slot = ring_slot
            ring_slot, ring_phase = advance(ring_slot, ring_phase, full)
        accumulator = warpgroup_mma_wait(num_outstanding=0, deps=(accumulator,))
        mbarrier.arrive(empty.index(2 * previous_slot + HALF))
        product_tile = _silu_product(accumulator, out.dtype)
        tma.store_wait(pendings=0)  # TMA has read the tile staged here before
        staged.store(product_tile)
        fence_async_shared()
        async_store(out, [tile_m * BLOCK_M + HALF * HALF_ROWS, tile_i * BLOCK_I], staged)
    tma.store_wait(pendings=0)  # the CTA's shared memory must live until TMA has read it


@gluon.jit
def _gemm(
    a,
    b,
    out,
    M,
    I,
    K,
    BLOCK_M: gl.constexpr,
    BLOCK_I: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_i = gl.cdiv(I, BLOCK_I)
    steps = gl.cdiv(K, BLOCK_K)
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [2 * STAGES] + b.block_type.shape, b.layout)
    out_buffers = gl.allocate_shared_memory(out.dtype, [2] + out.block_type.shape, out.layout)
    full_bar = new_barriers(STAGES, 1)
    free_bar = new_barriers(2 * STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, tiles_m, tiles_i, steps, a_ring, b_ring, full_bar, free_bar, out_buffers.index(0),
                        BLOCK_M, BLOCK_I, BLOCK_K, STAGES, GROUP_M, 0)),
            (_consume, (out, tiles_m, tiles_i, steps, a_ring, b_ring, full_bar, free_bar, out_buffers.index(1),
                        BLOCK_M, BLOCK_I, BLOCK_K, STAGES, GROUP_M, 1)),
            (_produce, (a, b, I, tiles_m, tiles_i, steps, a_ring, b_ring, full_bar, free_bar, BLOCK_M, BLOCK_I, BLOCK_K,
                        GROUP_M)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def by_maps(of: Arguments) -> Any:
    """Computes the arguments of a kernel launch: the grid, and the sizes M, I and K.  Each of `a`, the weight and the
    output also gets a function that makes its TMA map."""
    (M, K), I, config = of.a.shape, of.out.shape[1], of.config
    (a, weight), out = stored_operands(of.a, of.b), stored_output(of.out)
    half_rows, rows = config.block_m // 2, weight._replace(transposed=False)
    map_boxes = (a, half_rows, config.block_k), (rows, config.block_i, config.block_k), (out, half_rows, config.block_i)
    tensor_maps = [matrix.map(box_rows, box_columns, of.a.dtype) for matrix, box_rows, box_columns in map_boxes]
    grid = (min(cdiv(M, config.block_m) * cdiv(I, config.block_i), sm_count(of.a.device)),)
    return *tensor_maps, grid, (M, I, K)


@kernel(
    backend="gluon",
    min_sm=90,
    dtypes={"a": HALF_DTYPES},
    unsupported=why_no_maps,
    aligned=("a", "b"),
    empty=lambda of: of.out.zero_(),
    bind=by_maps,
    traffic=traffic,
    tuning=TUNING,
    over="persistent",
    shows={
        "M=2048,I=14336,K=4096,layout=NT": (
            "not below.uses_warp_specialization and uses_warp_specialization; "
            'threads == 384 and in_ptx("setmaxnreg") and stack_bytes == 0; '
            "loop.wgmma > loop.tma == loop.shared_load == loop.shared_store == 0; "
            'in_ptx("m64n256k16") and loop.wgmma == 4 and global_store == 0'
        )
    },
)
def cooperative(a: Tensor, b: Tensor, out: Tensor, *, config: PairRing, bound: Any) -> None:
    """Computes `silu(a @ gate) * (a @ up)` on Hopper's tensor cores, summed in fp32 and rounded once."""
    a_map, b_map, out_map, grid, size_args = bound
    _gemm[grid](a_map(a), b_map(b), out_map(out), *size_args, num_warps=4, **config.launch_arguments)
