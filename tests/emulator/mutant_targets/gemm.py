"""Kernels of dense matrix products."""

from __future__ import annotations

from mutant_targets.target import BARRIERS, Target


def _tiles(m: int, n: int, k: int, **more: int) -> dict[str, int]:
    return {"block_m": m, "block_n": n, "block_k": k, **more}


TARGETS = {
    "gemm_cooperative": Target(
        "gemm", "cooperative", ("M=136,N=72,K=200,layout=NT,bias=true,residual=true",),
        _tiles(128, 64, 64, stages=3, group_m=2, store_n=32),
        ("drop mbarrier.arrive 2", "drop fence.proxy.async 3", "drop cp.async.bulk.wait_group 1"),
        (("sms", 1), ("without", BARRIERS)),
    ),
    # Two tiles of four steps for the one cluster, and a ring of two slots.
    "gemm_multicast": Target(
        "gemm", "multicast", ("M=200,N=136,K=200,layout=NT,bias=true",),
        {"consumers": 2, "block_n": 128, "stages": 2, "group_m": 8, "staged": 1}, (), (("sms", 2),),
    ),
    "gemm_naive": Target("gemm", "naive", ("M=16,N=32,K=100,layout=NN,bias=true",)),
    "gemm_shared_tiles": Target("gemm", "shared_tiles", ("M=130,N=8,K=30,layout=NT,bias=true",)),
    "gemm_tensor_core": Target(
        "gemm", "tensor_core", ("M=136,N=72,K=200,layout=NT,bias=true,residual=true",),
        _tiles(128, 64, 64, num_warps=8, group_m=8),
    ),
    "gemm_wgmma": Target(
        "gemm", "pipelined", ("M=128,N=128,K=320,layout=NN,bias=true",),
        _tiles(128, 128, 64, num_warps=8, num_stages=3, group_m=8),
        ("drop wgmma.fence 1", "drop wgmma.commit_group 1", "one more pending in wgmma.wait_group 1",
         "drop fence.proxy.async 1", "drop bar.sync 2"),
    ),
    "gemm_tma": Target(
        "gemm", "tma", ("M=136,N=72,K=648,layout=NT,bias=true,residual=true",),
        _tiles(128, 64, 64, num_warps=8, num_stages=3, group_m=8),
        ("fewer bytes in mbarrier.arrive.expect_tx 3", "drop bar.sync 7"),
    ),
    "gemm_persistent": Target(
        "gemm", "persistent", ("M=136,N=264,K=200,layout=NT,bias=true",),
        _tiles(128, 256, 64, num_warps=8, num_stages=3, store_parts=4, group_m=8), (), (("sms", 1),),
    ),
    "gemm_warp_specialized": Target(
        "gemm", "warp_specialized", ("M=136,N=72,K=200,layout=NT,bias=true",),
        _tiles(128, 64, 64, num_warps=4, num_stages=3, group_m=8), (), (("sms", 1),),
    ),
    "gemm_split_k": Target(
        "gemm", "split_k", ("M=16,N=40,K=400,layout=NT,bias=true",),
        _tiles(16, 32, 32, split=2, num_warps=4, num_stages=3),
    ),
    # Two CTAs share three tiles of five steps: each has a whole one and a part of another.
    "gemm_stream_k": Target(
        "gemm", "stream_k", ("M=16,N=72,K=160,layout=NT,bias=true",),
        _tiles(16, 32, 32, num_warps=4, num_stages=3), (), (("sms", 2),),
    ),
    "gemm_swap_ab": Target(
        "gemm", "swap_ab", ("M=9,N=136,K=840,layout=NT,bias=true,residual=true",),
        _tiles(16, 128, 64, num_stages=3, split=2),
        ("do not wait in mbarrier.try_wait 2", "relax barrier.cluster.arrive 1"),
    ),
    # Without the third way to add up (warps_k 1): its barrier is a warp's own, and the order of lanes is not watched.
    "gemm_gemv": Target(
        "gemm", "gemv", ("M=2,N=60,K=1600,layout=NT,bias=true",),
        {"rows": 2, "unroll": 2, "warps_k": 2, "split": 2},
    ),
}  # fmt: skip
