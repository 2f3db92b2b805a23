"""Implements the kernel `promoted_ws`.  One warp only loads, and a warpgroup adds in fp32 while another runs wgmma.

The kernel improves on `promoted`, where the tensor cores are idle during the fp32 adds.  Here each 64 rows of a tile
belong to one consumer warpgroup, which waits only for the producer warp.  This is DeepGEMM's design, with up to three
consumers.  CTAs are persistent, so the next tile is loaded while the last tile is stored.

With 128 rows per consumer the kernel would read less from L2.  But with block scales this would spill 136 bytes per
thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from rooflab.kernels._tma import ALIGNMENT
from rooflab.kernels.gemm._operands import Stored, epilogue_alone, stored_operands
from rooflab.kernels.gemm._tiles import Config, by_pointers, one_wave, outputs
from rooflab.kernels.gemm_fp8._configs import BLOCK_K
from rooflab.kernels.gemm_fp8._operands import block_scaled, scale_strides, tiles_traffic, why_not_operands
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.tma import async_load, async_store
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning, space
from rooflab.reference.spec import Arguments, Case, Scheme
from rooflab.roofline.occupancy import HOPPER

PRODUCER_REGISTERS = 32
CONSUMER_REGISTERS = {1: 216, 2: 232, 3: 160}
"""Registers per thread, by number of consumers: an SM's 65536 minus the producer's, a multiple of 8, at most 255."""
SUM_REGISTERS = 16
"""The least registers of a consumer for addresses, barriers and scales.  The accumulators come on top."""


@dataclass(frozen=True)
class ConsumerTile:
    """A config: the tile sizes and the slots of the ring buffer.  A consumer warpgroup has 64 rows of a tile."""

    block_m: int
    block_n: int
    num_stages: int
    group_m: int = 8
    """The number of row panels of tiles that share their columns of `b` in L2."""


def footprint(config: ConsumerTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA, and the number of CTAs (at most one per SM).

    Shared memory holds the ring buffer, and a finished tile before its store.  `registers` is the number per thread at
    launch.  The producer warp counts as four warps, because registers are given to whole warpgroups."""
    warps = 4 * (config.block_m // 64 + 1)
    cta_resources = by_pointers(Config(config.block_m, config.block_n, BLOCK_K, warps, config.num_stages), case, scheme)
    registers = min(HOPPER.registers // cta_resources.threads // 8 * 8, config.block_n + SUM_REGISTERS)
    return one_wave(replace(cta_resources, registers=registers), 2 * config.block_m * config.block_n)


# By rows and columns of the result; unmeasured.
TUNING = Tuning(
    ConsumerTile,  # of one to three consumers, with tiles up to the columns of one block scale
    space(
        ConsumerTile, block_m=(64, 128, 192), block_n=(16, 32, 64, 128), num_stages=(3, 4, 5, 6, 8), group_m=(1, 4, 8)
    ),
    Defaults(
        (
            ({"M": 64, "N": 4096}, ConsumerTile(64, 16, 8)),
            ({"M": 64, "N": 7168}, ConsumerTile(64, 32, 8)),
            ({"M": 64}, ConsumerTile(64, 128, 8)),
            ({"N": 4096, "outputs": 524288}, ConsumerTile(128, 16, 5)),
            ({"K": 512}, ConsumerTile(128, 128, 5)),
            ({"outputs": 917504}, ConsumerTile(128, 32, 5)),
            ({"outputs": 2097152}, ConsumerTile(128, 64, 5)),
            ({"outputs": 8388608}, ConsumerTile(128, 128, 5)),
            ({"outputs": 12582912}, ConsumerTile(192, 128, 4)),  # three consumers fill the last wave better
            ({}, ConsumerTile(128, 128, 5)),
        ),
        outputs,
    ),
    footprint,
)


@gluon.jit
def _place(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    group_tiles = GROUP_M * gl.cdiv(N, BLOCK_N)
    first_m = tile // group_tiles * GROUP_M
    group_m = gl.minimum(gl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    return (first_m + tile % group_tiles % group_m) * BLOCK_M, tile % group_tiles // group_m * BLOCK_N


@gluon.jit
def _produce(
    shared,
    a_map,
    b_map,
    M,
    N,
    K,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    a_ring, b_ring, full_bars, empty_bars, _ = shared
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    ring_step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            ring_slot = ring_step % STAGES
            full_barrier = full_bars.index(ring_slot)
            mbarrier.wait(empty_bars.index(ring_slot), (ring_step // STAGES & 1) ^ 1)
            mbarrier.expect(full_barrier, CONSUMERS * a_map.block_type.nbytes + b_map.block_type.nbytes)
            async_load(b_map, [column, k], full_barrier, b_ring.index(ring_slot))
            for consumer in gl.static_range(CONSUMERS):
                a_slot = a_ring.index(ring_slot * CONSUMERS + consumer)
                async_load(a_map, [row + 64 * consumer, k], full_barrier, a_slot)
            ring_step += 1


@gluon.jit
def _consume(shared, c_map, pointers, M, N, K, strides, WHICH: gl.constexpr, CONSUMERS: gl.constexpr,
              HAS_BIAS: gl.constexpr, BLOCK_SCALES: gl.constexpr, BY_TMA: gl.constexpr,
              BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    a_ring, b_ring, full_bars, empty_bars, c_buffers = shared
    a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr = pointers
    stride_am, stride_ak, stride_bk, stride_bn, stride_om = strides
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 32])
    zero_tile = gl.zeros((64, BLOCK_N), gl.float32, mma_layout)
    out_buffer = c_buffers.index(WHICH)
    ring_step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row += 64 * WHICH
        # int64, because row * stride passes 2**31 from M * N = 2**31 on.
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, mma_layout))
        if BLOCK_SCALES:
            a_scales = a_scale_ptr + rows * stride_am
            b_scales = b_scale_ptr + (column // BLOCK_K).to(gl.int64) * stride_bn
        fp32_sums = zero_tile
        for _ in range(0, K, BLOCK_K):
            ring_slot = ring_step % STAGES
            if BLOCK_SCALES:
                # Loaded before the wait for the tile, so the scales arrive before the product is done.
                b_scale = gl.load(b_scales)
                a_scale = gl.load(a_scales, mask=rows < M, other=0.0)
                a_scales += stride_ak
                b_scales += stride_bk
            mbarrier.wait(full_bars.index(ring_slot), ring_step // STAGES & 1)
            a_tile = a_ring.index(ring_slot * CONSUMERS + WHICH)
            b_tile = b_ring.index(ring_slot).permute((1, 0))
            block_product = warpgroup_mma(a_tile, b_tile, zero_tile, use_acc=False, is_async=True)
            block_product = warpgroup_mma_wait(num_outstanding=0, deps=(block_product,))
            mbarrier.arrive(empty_bars.index(ring_slot), count=1)
            fp32_sums += block_product * (a_scale * b_scale)[:, None] if BLOCK_SCALES else block_product
            ring_step += 1
        if not BLOCK_SCALES:
            fp32_sums *= gl.load(a_scale_ptr) * gl.load(b_scale_ptr)
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, mma_layout))
        if HAS_BIAS:
            fp32_sums += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        if BY_TMA:
            tma.store_wait(pendings=0)
            out_buffer.store(fp32_sums.to(gl.bfloat16))
            fence_async_shared()
            async_store(c_map, [row, column], out_buffer)
        else:
            out_mask = (rows < M)[:, None] & (columns < N)[None, :]
            gl.store(out_ptr + rows[:, None] * stride_om + columns[None, :], fp32_sums.to(gl.bfloat16), mask=out_mask)
    if BY_TMA:
        tma.store_wait(pendings=0)


@gluon.jit
def _gemm(a_map, b_map, c_map, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K,
          stride_am, stride_ak, stride_bk, stride_bn, stride_om, HAS_BIAS: gl.constexpr, BLOCK_SCALES: gl.constexpr,
          BY_TMA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          GROUP_M: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
          PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    CONSUMER_COUNT: gl.constexpr = BLOCK_M // 64
    a_ring = gl.allocate_shared_memory(a_map.dtype, [STAGES * CONSUMER_COUNT, 64, BLOCK_K], a_map.layout)
    b_ring = gl.allocate_shared_memory(b_map.dtype, [STAGES, BLOCK_N, BLOCK_K], b_map.layout)
    c_buffers = gl.allocate_shared_memory(gl.bfloat16, [CONSUMER_COUNT, 64, BLOCK_N], c_map.layout)
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage_id in gl.static_range(STAGES):
        mbarrier.init(full_bars.index(stage_id), count=1)
        mbarrier.init(empty_bars.index(stage_id), count=CONSUMER_COUNT)
    fence_async_shared()
    shared = (a_ring, b_ring, full_bars, empty_bars, c_buffers)
    ptr_args = (a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr)
    strides = (stride_am, stride_ak, stride_bk, stride_bn, stride_om)
    gl.warp_specialize(
        [
            (_consume, (shared, c_map, ptr_args, M, N, K, strides, role, CONSUMER_COUNT, HAS_BIAS, BLOCK_SCALES, BY_TMA,
                        BLOCK_N, BLOCK_K, GROUP_M, STAGES))
            if role < CONSUMER_COUNT else
            (_produce, (shared, a_map, b_map, M, N, K, CONSUMER_COUNT, BLOCK_N, BLOCK_K, GROUP_M, STAGES))
            for role in (0, 1, 2, 3)[: CONSUMER_COUNT + 1]
        ],
        [4] * (CONSUMER_COUNT - 1) + [1],
        [CONSUMER_REGISTERS] * (CONSUMER_COUNT - 1) + [PRODUCER_REGISTERS],
    )  # fmt: skip


def arranged(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options, such as the grid, and whether TMA can store `c`."""
    a, b, c, config = of.a, of.b, of.c, of.config
    (M, K), N = a.shape, b.shape[1]
    stores_by_tma = c.stride(0) * c.itemsize % ALIGNMENT == 0 and c.data_ptr() % ALIGNMENT == 0
    stored_a, stored_b = stored_operands(a, b)
    stored_c = Stored(M, N, c.stride(0), False) if stores_by_tma else Stored(1, 8, 8, False)
    tensor_maps = (
        stored_a.map(64, BLOCK_K, a.dtype),
        stored_b.map(BLOCK_K, config.block_n, b.dtype),
        stored_c.map(64, config.block_n, c.dtype),
    )
    grid = (min(cdiv(M, config.block_m) * cdiv(N, config.block_n), sm_count(a.device)),)
    constexpr_args = {
        "HAS_BIAS": of.bias is not None,
        "BLOCK_SCALES": block_scaled(of.a_scale),
        "BY_TMA": stores_by_tma,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": BLOCK_K,
        "GROUP_M": config.group_m,
        "STAGES": config.num_stages,
        "num_warps": 4,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "CONSUMER_REGISTERS": CONSUMER_REGISTERS[config.block_m // 64],
    }
    return *tensor_maps, stores_by_tma, grid, (M, N, K, *scale_strides(of), c.stride(0)), constexpr_args


@kernel(
    backend="gluon",
    min_sm=90,
    unsupported=why_not_operands,
    aligned=("a", "b"),
    empty=epilogue_alone,
    bind=arranged,
    traffic=tiles_traffic,
    tuning=TUNING,
    over="promoted",
    shows={
        "M=2048,N=28672,K=4096,scales={tensor|block},bias=false": (
            r"uses_warp_specialization and threads == 384 and grid[0] == 132 and spill_stores == 0; loop.wgmma == 4; "
            r"max(loop.FADD, loop.FFMA) == 64 and loop.tma == 0 and any(body.tma == 3 for body in loops); "
            r'in_sass(r"QGMMA\.\S+ R\d+, gdesc\[UR\d+\], RZ") == 2; in_sass(r"QGMMA\.\S+ R\d+, gdesc\[UR\d+\], ") == 8'
        )
    },
)
def promoted_ws(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    fast_accum: bool,
    config: ConsumerTile,
    bound: Any,
) -> None:
    """Computes the same result as `promoted`, by specialized warps in persistent CTAs.  TMA stores `c` if possible."""
    a_map, b_map, c_map, stores_by_tma, grid, scalar_args, constexpr_args = bound
    c_map_tensor = c if stores_by_tma else c.new_empty((1, 8))
    _gemm[grid](a_map(a), b_map(b), c_map(c_map_tensor), a_scale, b_scale, bias, c, *scalar_args, **constexpr_args)
