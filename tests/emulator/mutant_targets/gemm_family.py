"""Kernels of matrix products in fp8, of packed weights, fused and grouped.

The numbers of steps are such that the last step is in the first slot of a ring of three, where results are staged.
"""

from __future__ import annotations

from mutant_targets.target import Target

FP8 = ("scheme", "fp8_e4m3")
ONE_SM = ("sms", 1)


def _tiles(m: int, **more: int) -> dict[str, int]:
    return {"block_m": m, "block_n": 64, **more}


def _gemv(bits: int, scheme: str, split: int) -> Target:
    config = {"warps": 4, "warps_k": 2, "split": split, "depth": 2}
    case = f"M=2,N=40,K=3100{',zeros=true' if bits == 4 else ''},bias=true"
    return Target(f"gemm_w{bits}a16", "gemv", (case,), config, (), (("scheme", scheme),))


TRITON = {"num_warps": 8, "num_stages": 3, "group_m": 8}
TARGETS: dict[str, Target] = {
    "fp8_fast_accum": Target(
        "gemm_fp8", "fast_accum", ("M=136,N=72,K=1168,scales=tensor,bias=true,fast_accum=true",),
        _tiles(128, block_k=128, **TRITON), (), (FP8,),
    ),
    "fp8_promoted": Target(
        "gemm_fp8", "promoted", ("M=136,N=72,K=1168,scales=block,bias=true",),
        _tiles(128, block_k=128, **TRITON), (), (FP8,),
    ),
    "fp8_promoted_ws": Target(
        "gemm_fp8", "promoted_ws", ("M=136,N=72,K=1296,scales=block,bias=true",),
        _tiles(128, num_stages=3, group_m=2), (), (FP8, ONE_SM),
    ),
    # Two tiles of five steps for the one cluster, and a ring of two slots.
    "fp8_multicast": Target(
        "gemm_fp8", "multicast", ("M=200,N=136,K=528,scales=block,bias=true",),
        {"consumers": 2, "block_n": 128, "stages": 2, "group_m": 8, "staged": 1}, (),
        (FP8, ("sms", 2)),
    ),
    "silu_fused_wgmma": Target(
        "gemm_silu_and_mul", "fused", ("M=136,I=80,K=592,layout=NT",),
        {"block_m": 128, "block_i": 64, "block_k": 64, **TRITON},
    ),
    # Rows of 64 bytes: the staged result's rows, of 128, then lie over those that the other warpgroup multiplies.
    "silu_tma": Target(
        "gemm_silu_and_mul", "tma", ("M=136,I=72,K=296,layout=NT",),
        {"block_m": 128, "block_i": 64, "block_k": 32, **TRITON},
    ),
    "silu_persistent": Target(
        "gemm_silu_and_mul", "persistent", ("M=136,I=72,K=200,layout=NT",),
        {"block_m": 128, "block_i": 64, "block_k": 64, **TRITON, "group_m": 2}, (), (ONE_SM,),
    ),
    "silu_cooperative": Target(
        "gemm_silu_and_mul", "cooperative", ("M=136,I=40,K=200,layout=NT",),
        {"block_m": 128, "block_i": 32, "block_k": 64, "stages": 3, "group_m": 2}, (), (ONE_SM,),
    ),
    "grouped_wgmma": Target(
        "gemm_grouped", "grouped", ("T=256,top_k=1,E=2,N=80,K=592,skew=1.0",), _tiles(128, block_k=64, **TRITON),
    ),
    "grouped_tma": Target(
        "gemm_grouped", "tma", ("T=136,top_k=1,E=3,N=72,K=584,skew=1.0",), _tiles(128, block_k=64, **TRITON),
    ),
    # Groups of 152 and 128 rows, whole tiles last; then of 113, 38 and 49, which end in either half of a tile.
    "grouped_cooperative": Target(
        "gemm_grouped", "cooperative",
        ("T=280,top_k=1,E=2,N=72,K=200,skew=0.0", "T=200,top_k=1,E=3,N=72,K=200,skew=1.0"),
        _tiles(128, block_k=64, stages=3, store_n=32, group_m=2), (), (ONE_SM,),
    ),
    # Eleven steps: the copies behind the last tile, which are of zeros, go over the first slot here.
    "w4a16_g32": Target(
        "gemm_w4a16", "dequant_dot", ("M=40,N=72,K=336,zeros=true,bias=true",),
        _tiles(32, num_warps=4, num_stages=3, split=1), (), (("scheme", "w4a16_g32"),),
    ),
    "w8a16": Target(
        "gemm_w8a16", "dequant_dot", ("M=40,N=136,K=1168,bias=true",),
        {"block_m": 32, "block_n": 128, "num_warps": 8, "num_stages": 3, "split": 1}, (), (("scheme", "w8a16"),),
    ),
    "w4a16_gemv_cluster": _gemv(4, "w4a16_g64", 4),
    "w8a16_gemv_cta": _gemv(8, "w8a16", 1),
}  # fmt: skip
