"""The partitions of promoted_ws: one warp loads, and each warpgroup multiplies and adds its 64 rows."""

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

from rooflab.kernels._gluon import async_load, async_store


@gluon.jit
def place(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    group_tiles = GROUP_M * gl.cdiv(N, BLOCK_N)
    first_m = tile // group_tiles * GROUP_M
    group_m = gl.minimum(gl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    return (first_m + tile % group_tiles % group_m) * BLOCK_M, tile % group_tiles // group_m * BLOCK_N


@gluon.jit
def produce(shared, a_map, b_map, M, N, K, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
             BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    a_ring, b_ring, full, empty, _ = shared
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, CONSUMERS * a_map.block_type.nbytes + b_map.block_type.nbytes)
            async_load(b_map, [column, k], bar, b_ring.index(slot))
            for which in gl.static_range(CONSUMERS):
                piece = a_ring.index(slot * CONSUMERS + which)
                async_load(a_map, [row + 64 * which, k], bar, piece)
            step += 1


@gluon.jit
def consume(shared, c_map, pointers, M, N, K, strides, WHICH: gl.constexpr, CONSUMERS: gl.constexpr,
             HAS_BIAS: gl.constexpr, BLOCK_SCALES: gl.constexpr, BY_TMA: gl.constexpr,
             BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    a_ring, b_ring, full, empty, c_kept = shared
    a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr = pointers
    stride_am, stride_ak, stride_bk, stride_bn, stride_om = strides
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, BLOCK_N, 32])
    zeros = gl.zeros((64, BLOCK_N), gl.float32, layout)
    kept = c_kept.index(WHICH)
    step = 0
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row += 64 * WHICH
        # int64, because row * stride passes 2**31 from M * N = 2**31 on.
        rows = row.to(gl.int64) + gl.arange(0, 64, gl.SliceLayout(1, layout))
        if BLOCK_SCALES:
            a_scales = a_scale_ptr + rows * stride_am
            b_scales = b_scale_ptr + (column // BLOCK_K).to(gl.int64) * stride_bn
        sums = zeros
        for _ in range(0, K, BLOCK_K):
            slot = step % STAGES
            if BLOCK_SCALES:
                # Loaded before the wait for the tile, so the scales arrive before the product is done.
                b_scale = gl.load(b_scales)
                a_scale = gl.load(a_scales, mask=rows < M, other=0.0)
                a_scales += stride_ak
                b_scales += stride_bk
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            left = a_ring.index(slot * CONSUMERS + WHICH)
            right = b_ring.index(slot).permute((1, 0))
            product = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
            mbarrier.arrive(empty.index(slot), count=1)
            sums += product * (a_scale * b_scale)[:, None] if BLOCK_SCALES else product
            step += 1
        if not BLOCK_SCALES:
            sums *= gl.load(a_scale_ptr) * gl.load(b_scale_ptr)
        columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        if HAS_BIAS:
            sums += gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        if BY_TMA:
            tma.store_wait(pendings=0)
            kept.store(sums.to(gl.bfloat16))
            fence_async_shared()
            async_store(c_map, [row, column], kept)
        else:
            mask = (rows < M)[:, None] & (columns < N)[None, :]
            gl.store(out_ptr + rows[:, None] * stride_om + columns[None, :], sums.to(gl.bfloat16), mask=mask)
    if BY_TMA:
        tma.store_wait(pendings=0)
