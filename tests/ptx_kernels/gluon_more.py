"""Gluon kernels beside the ring: two consumers, A in registers, cp.async that arrives at mbarriers, mma.sync, TMA in
and out, clusters with multicast."""

from __future__ import annotations

import torch
from ptx_kernels.gluon_matmul import KINDS
from ptx_kernels.trial import DTYPES, Trial, blank, operands, product, whole
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def fill(a, b, K, a_ring, b_ring, full, empty, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
         STAGES: gl.constexpr):  # fmt: skip
    pm, pn = gl.program_id(0) * BM, gl.program_id(1) * BN
    for k in range(gl.cdiv(K, BK)):
        slot = k % STAGES
        mbarrier.wait(empty.index(slot), (k // STAGES & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, 2 * a.block_type.nbytes + b.block_type.nbytes)
        tma.async_copy_global_to_shared(a, [pm, k * BK], bar, a_ring.index(2 * slot))
        tma.async_copy_global_to_shared(a, [pm + BM // 2, k * BK], bar, a_ring.index(2 * slot + 1))
        tma.async_copy_global_to_shared(b, [pn, k * BK], bar, b_ring.index(slot))


@gluon.jit
def half_tile(c, N, K, a_ring, b_ring, full, empty, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
              STAGES: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    near: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    acc = gl.zeros((BM // 2, BN), gl.float32, layout)
    for k in range(gl.cdiv(K, BK)):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), k // STAGES & 1)
        acc = warpgroup_mma(a_ring.index(2 * slot + HALF), b_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(slot), count=1)
    # Through shared memory, with a barrier of these warps alone.
    out = gl.convert_layout(acc, near)
    rows = gl.program_id(0) * BM + HALF * (BM // 2) + gl.arange(0, BM // 2, gl.SliceLayout(1, near))
    columns = gl.program_id(1) * BN + gl.arange(0, BN, gl.SliceLayout(0, near))
    gl.store(c + rows[:, None] * N + columns[None, :], out)


@gluon.jit
def two_consumers(a, b, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (half_tile, (c, N, K, a_ring, b_ring, full, empty, BM, BN, BK, STAGES, 0)),
            (half_tile, (c, N, K, a_ring, b_ring, full, empty, BM, BN, BK, STAGES, 1)),
            (fill, (a, b, K, a_ring, b_ring, full, empty, BM, BN, BK, STAGES)),
        ],
        [4, 1],
        [200, 24],
    )


@gluon.jit
def a_in_registers(a, b, c, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """C = (2 A) B, where A passes through registers."""
    a_tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    b_tile = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(gl.cdiv(K, BK)):
        mbarrier.expect(full.index(0), a.block_type.nbytes + b.block_type.nbytes)
        tma.async_copy_global_to_shared(a, [gl.program_id(0) * BM, k * BK], full.index(0), a_tile)
        tma.async_copy_global_to_shared(b, [k * BK, 0], full.index(0), b_tile)
        mbarrier.wait(full.index(0), k & 1)
        x = a_tile.load(left)
        acc = warpgroup_mma(x + x, b_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    near: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    out = gl.convert_layout(acc, near)
    rows = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, near))
    gl.store(c + rows[:, None] * BN + gl.arange(0, BN, gl.SliceLayout(0, near))[None, :], out)


@gluon.jit
def copies_that_arrive(x, out, steps, N: gl.constexpr, STAGES: gl.constexpr):
    """Sums rows that cp.async brings, each announced at an mbarrier."""
    near: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, N], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    at = gl.arange(0, N, near)
    total = gl.zeros((N,), gl.float32, near)
    for k in range(steps + STAGES - 1):
        if k < steps:
            async_copy.async_copy_global_to_shared(ring.index(k % STAGES), x + k * N + at)
            async_copy.mbarrier_arrive(full.index(k % STAGES))
            mbarrier.arrive(full.index(k % STAGES))
        if k >= STAGES - 1:
            old = k - (STAGES - 1)
            mbarrier.wait(full.index(old % STAGES), old // STAGES & 1)
            total += ring.index(old % STAGES).load(near)
    gl.store(out + at, total)


@gluon.jit
def old_mma(a, b, c, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    near: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8])
    rows, columns = gl.arange(0, BM, gl.SliceLayout(1, near)), gl.arange(0, BN, gl.SliceLayout(0, near))
    depth_a, depth_b = gl.arange(0, K, gl.SliceLayout(0, near)), gl.arange(0, K, gl.SliceLayout(1, near))
    x = gl.load(a + rows[:, None] * K + depth_a[None, :])
    y = gl.load(b + depth_b[:, None] * BN + columns[None, :])
    acc = gl.zeros((BM, BN), gl.float32, layout)
    acc = mma_v2(
        gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2)),
        gl.convert_layout(y, gl.DotOperandLayout(1, layout, 2)),
        acc,
    )
    gl.store(c + rows[:, None] * BN + columns[None, :], gl.convert_layout(acc, near))


@gluon.jit
def in_and_out(x, y, tiles, BM: gl.constexpr, BN: gl.constexpr):
    """Doubles tiles; a store may still read while the next tile is loaded."""
    near: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    read = gl.allocate_shared_memory(x.dtype, [2] + x.block_type.shape, x.layout)
    kept = gl.allocate_shared_memory(y.dtype, [2] + y.block_type.shape, y.layout)
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    fence_async_shared()
    for tile in range(tiles):
        mbarrier.expect(full.index(0), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [tile * BM, 0], full.index(0), read.index(tile % 2))
        mbarrier.wait(full.index(0), tile & 1)
        values = read.index(tile % 2).load(near)
        tma.store_wait(pendings=1)
        kept.index(tile % 2).store(values + values)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [tile * BM, 0], kept.index(tile % 2))
    tma.store_wait(pendings=0)


def consumers(seed: int, *, M=256, N=128, K=256, BM=128, BN=64, BK=64, stages=2, dtype="bf16") -> Trial:
    a, b = operands(M, N, K, "NT", dtype, seed)
    c, kind = blank(M, N), KINDS[DTYPES[dtype]]
    maps = [
        TensorDescriptor.from_tensor(t, box, gl.NVMMASharedLayout.get_default_for(box, kind))
        for t, box in ((a, [BM // 2, BK]), (b, [BN, BK]))
    ]
    grid = (M // BM, N // BN)
    return Trial(lambda: two_consumers[grid](*maps, c, N, K, BM, BN, BK, stages), [c], [product(a, b, "NT")])


def registers(seed: int, *, M=128, N=64, K=192, BK=64, dtype="fp16") -> Trial:
    a, b = operands(M, N, K, "NN", dtype, seed)
    c, kind = blank(M, N), KINDS[DTYPES[dtype]]
    maps = [
        TensorDescriptor.from_tensor(t, box, gl.NVMMASharedLayout.get_default_for(box, kind))
        for t, box in ((a, [64, BK]), (b, [BK, N]))
    ]
    return Trial(lambda: a_in_registers[(M // 64,)](*maps, c, K, 64, N, BK), [c], [2 * product(a, b, "NN")])


def arrivals(seed: int, *, steps=7, N=512, stages=3) -> Trial:
    x, out = whole((steps, N), seed), blank(N)
    return Trial(lambda: copies_that_arrive[(1,)](x, out, steps, N, stages), [out], [x.sum(0)])


def mma(seed: int, *, M=64, N=32, K=64, dtype="fp16") -> Trial:
    a, b = operands(M, N, K, "NN", dtype, seed)
    c = blank(M, N)
    return Trial(lambda: old_mma[(1,)](a, b, c, K, M, N), [c], [product(a, b, "NN")])


def doubles(seed: int, *, tiles=5, BM=32, BN=64, dtype="fp32") -> Trial:
    x = whole((tiles * BM, BN), seed, DTYPES[dtype])
    y = torch.zeros_like(x)
    layout = gl.NVMMASharedLayout.get_default_for([BM, BN], KINDS[x.dtype])
    maps = [TensorDescriptor.from_tensor(t, [BM, BN], layout) for t in (x, y)]
    return Trial(lambda: in_and_out[(1,)](*maps, tiles, BM, BN), [y], [2 * x.double()])
