"""Gluon's matmuls: a ring of TMA loads, mbarriers and wgmma, in one warpgroup, specialised, and with cp.async."""

from __future__ import annotations

import torch
from ptx_kernels.trial import DTYPES, Trial, blank, operands, product
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
         torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}  # fmt: skip


@gluon.jit
def store_tile(c, acc, pm, pn):
    kept = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    kept.store(acc.to(c.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(c, [pm, pn], kept)
    tma.store_wait(pendings=0)


@gluon.jit
def issue(a, b, pm, pn, k, a_ring, b_ring, full, STAGES: gl.constexpr, BK: gl.constexpr, B_T: gl.constexpr, pred=True):
    slot = k % STAGES
    bar = full.index(slot)
    mbarrier.expect(bar, a.block_type.nbytes + b.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(a, [pm, k * BK], bar, a_ring.index(slot), pred=pred)
    if B_T:
        tma.async_copy_global_to_shared(b, [pn, k * BK], bar, b_ring.index(slot), pred=pred)
    else:
        tma.async_copy_global_to_shared(b, [k * BK, pn], bar, b_ring.index(slot), pred=pred)


@gluon.jit
def ring(a, b, c, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, B_T: gl.constexpr):
    """One group of warps that loads ahead and keeps one wgmma in flight."""
    pm, pn = gl.program_id(0) * BM, gl.program_id(1) * BN
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    steps = gl.cdiv(K, BK)
    for k in gl.static_range(STAGES - 2):
        issue(a, b, pm, pn, k, a_ring, b_ring, full, STAGES, BK, B_T, pred=k < steps)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 256 // a.dtype.primitive_bitwidth]
    )
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(steps):
        issue(a, b, pm, pn, k + STAGES - 2, a_ring, b_ring, full, STAGES, BK, B_T, pred=k + STAGES - 2 < steps)
        slot = k % STAGES
        mbarrier.wait(full.index(slot), k // STAGES & 1)
        right = b_ring.index(slot)
        if B_T:
            acc = warpgroup_mma(a_ring.index(slot), right.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(a_ring.index(slot), right, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))
    store_tile(c, acc, pm, pn)


@gluon.jit
def produce(a, b, c, K, a_ring, b_ring, full, empty, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
            STAGES: gl.constexpr, B_T: gl.constexpr):  # fmt: skip
    pm, pn = gl.program_id(0) * BM, gl.program_id(1) * BN
    for k in range(gl.cdiv(K, BK)):
        mbarrier.wait(empty.index(k % STAGES), (k // STAGES & 1) ^ 1)
        issue(a, b, pm, pn, k, a_ring, b_ring, full, STAGES, BK, B_T)


@gluon.jit
def consume(a, b, c, K, a_ring, b_ring, full, empty, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
            STAGES: gl.constexpr, B_T: gl.constexpr):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 256 // a.dtype.primitive_bitwidth]
    )
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(gl.cdiv(K, BK)):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), k // STAGES & 1)
        right = b_ring.index(slot)
        if B_T:
            acc = warpgroup_mma(a_ring.index(slot), right.permute((1, 0)), acc, is_async=True)
        else:
            acc = warpgroup_mma(a_ring.index(slot), right, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(slot), count=1)
    store_tile(c, acc, gl.program_id(0) * BM, gl.program_id(1) * BN)


@gluon.jit
def specialised(
    a, b, c, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, B_T: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Consumers in the warps of the launch, a producer of one warp with few registers."""
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (a, b, c, K, a_ring, b_ring, full, empty, BM, BN, BK, STAGES, B_T)),
            (produce, (a, b, c, K, a_ring, b_ring, full, empty, BM, BN, BK, STAGES, B_T)),
        ],
        [1],
        [REGISTERS],
    )


@gluon.jit
def by_cp_async(
    a, b, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """cp.async into the layout that wgmma reads, which wants a proxy fence before it does."""
    pm, pn = gl.program_id(0) * BM, gl.program_id(1) * BN
    near: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], KIND)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], KIND)
    a_ring = gl.allocate_shared_memory(KIND, [STAGES, BM, BK], a_layout)
    b_ring = gl.allocate_shared_memory(KIND, [STAGES, BK, BN], b_layout)
    rows = pm + gl.arange(0, BM, gl.SliceLayout(1, near))
    columns = pn + gl.arange(0, BN, gl.SliceLayout(0, near))
    depth_a, depth_b = gl.arange(0, BK, gl.SliceLayout(0, near)), gl.arange(0, BK, gl.SliceLayout(1, near))
    steps = gl.cdiv(K, BK)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BN, 256 // KIND.primitive_bitwidth]
    )
    acc = gl.zeros((BM, BN), gl.float32, layout)
    for k in range(-(STAGES - 1), steps):
        ahead = k + STAGES - 1
        if ahead < steps:
            x = a + rows[:, None] * K + (ahead * BK + depth_a)[None, :]
            y = b + (ahead * BK + depth_b)[:, None] * N + columns[None, :]
            async_copy.async_copy_global_to_shared(a_ring.index(ahead % STAGES), x)
            async_copy.async_copy_global_to_shared(b_ring.index(ahead % STAGES), y)
        async_copy.commit_group()
        if k >= 0:
            async_copy.wait_group(STAGES - 1)
            fence_async_shared()
            gl.barrier()
            acc = warpgroup_mma(a_ring.index(k % STAGES), b_ring.index(k % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            gl.barrier()
    out = gl.convert_layout(acc, near)
    gl.store(c + rows[:, None] * N + columns[None, :], out)


def tma_ring(
    seed: int, *, M=256, N=128, K=256, BM=64, BN=128, BK=64, stages=3, trans="NT", dtype="bf16", warps=4,
    specialise=False, registers=40,
) -> Trial:  # fmt: skip
    a, b = operands(M, N, K, trans, dtype, seed)
    c = blank(M, N)
    kind, boxes = KINDS[DTYPES[dtype]], ([BM, BK], [BN, BK] if trans[1] == "T" else [BK, BN], [BM, BN])
    maps = [
        TensorDescriptor.from_tensor(t, box, gl.NVMMASharedLayout.get_default_for(box, own))
        for t, box, own in zip((a, b, c), boxes, (kind, kind, gl.float32), strict=True)
    ]
    grid = (-(-M // BM), -(-N // BN))
    if specialise:
        launch = lambda: specialised[grid](*maps, K, BM, BN, BK, stages, trans[1] == "T", registers, num_warps=warps)
    else:
        launch = lambda: ring[grid](*maps, K, BM, BN, BK, stages, trans[1] == "T", num_warps=warps)
    return Trial(launch, [c], [product(a, b, trans)])


def cp_async(seed: int, *, M=128, N=128, K=256, BM=64, BN=64, BK=64, stages=3, dtype="fp16", warps=4) -> Trial:
    a, b = operands(M, N, K, "NN", dtype, seed)
    c = blank(M, N)
    return Trial(
        lambda: by_cp_async[(M // BM, N // BN)](
            a, b, c, N, K, BM, BN, BK, stages, KINDS[DTYPES[dtype]], num_warps=warps
        ),
        [c],
        [product(a, b, "NN")],
    )
