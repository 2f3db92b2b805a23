"""Gluon's clusters: two CTAs that share a tile of B, which TMA brings to both.

Triton 3.7.1 compiles neither a sum nor a change of layout across CTAs for sm_90.
"""

from __future__ import annotations

from ptx_kernels.gluon_matmul import KINDS
from ptx_kernels.trial import DTYPES, Trial, blank, operands, product
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def shared_b(a, b, c, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
             LAYOUT: gl.constexpr, NEAR: gl.constexpr, MULTICAST: gl.constexpr):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    mbarrier.sync_cluster_init()
    pm, pn = gl.program_id(0) * BM, gl.program_id(1) * BN
    acc = gl.zeros((BM, BN), gl.float32, LAYOUT)
    for k in range(gl.cdiv(K, BK)):
        slot = k % STAGES
        bar = full.index(slot)
        mbarrier.expect(bar, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_copy_global_to_shared(a, [pm, k * BK], bar, a_ring.index(slot))
        tma.async_copy_global_to_shared(b, [k * BK, pn], bar, b_ring.index(slot), multicast=MULTICAST)
        mbarrier.wait(bar, k // STAGES & 1)
        acc = warpgroup_mma(a_ring.index(slot), b_ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        # The other CTA may still read what the next copy overwrites here.
        gl.barrier(cluster=True)
    out = gl.convert_layout(acc, NEAR)
    rows = pm + gl.arange(0, BM, gl.SliceLayout(1, NEAR))
    columns = pn + gl.arange(0, BN, gl.SliceLayout(0, NEAR))
    gl.store(c + rows[:, None] * N + columns[None, :], out)


def multicast(seed: int, *, M=256, N=64, K=256, BM=128, BN=64, BK=64, stages=2, multicast=True) -> Trial:
    a, b = operands(M, N, K, "NN", "bf16", seed)
    c, kind = blank(M, N), KINDS[DTYPES["bf16"]]
    maps = [
        TensorDescriptor.from_tensor(t, box, gl.NVMMASharedLayout.get_default_for(box, kind, cga_layout=split))
        for t, box, split in ((a, [BM, BK], [[1, 0]]), (b, [BK, BN], [[0, 0]]))
    ]
    layout = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16], cga_layout=[[1, 0]])
    near = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0], cga_layout=[[1, 0]])
    return Trial(
        lambda: shared_b[(M // BM, N // BN)](
            *maps, c, N, K, BM, BN, BK, stages, layout, near, multicast, num_warps=4, num_ctas=2
        ),
        [c],
        [product(a, b, "NN")],
    )
