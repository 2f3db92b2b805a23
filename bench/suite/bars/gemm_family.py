"""Bars of the products beside gemm: fp8, weight-only, and gate-up with its activation."""

from __future__ import annotations

from rooflab.bench.suite.bars import AGAINST_LIBRARY, OF_BANDWIDTH, bar

_FP8_CASES = (
    "M=4096,N=4096,K=4096,scales=tensor,bias=false",
    "M=8192,N=8192,K=8192,scales=tensor,bias=false",
    "M=8192,N=8192,K=16384,scales=tensor,bias=false",
    *(
        f"M=2048,N={N},K={K},scales=tensor,bias=false"
        for N, K in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    ),
)
_PER_TOKEN = "M=1,N=8192,K=8192"
# 33.5 MB of codes, 2.1 MB of scales: 19 us on 3.35 TB/s, 14 us on 4.8 TB/s.
_W4A16_SHARE = 0.6
_W8A16_SHARE = 0.75

BARS = (
    bar(
        "gemm_fp8.large",
        "fp8 large: geomean >= 1.00x torch._scaled_mm(use_fast_accum=False), promoted every 128 of K",
        ("gemm_fp8",),
        AGAINST_LIBRARY,
        {"op": "gemm_fp8", "cases": list(_FP8_CASES), "geomean": 1.0, "scheme": "fp8_e4m3"},
        cost_s=40.0,
        value=77.0,
    ),
    bar(
        "gemm_w4a16.gemv",
        "w4a16, 8192 x 8192, M = 1: at most 19 us on an H100 and 14 us on an H200, 60% of the measured bandwidth",
        ("gemm_w4a16",),
        OF_BANDWIDTH,
        {
            "op": "gemm_w4a16",
            "least": {f"{_PER_TOKEN},zeros=false,bias=false": _W4A16_SHARE},
            "scheme": "w4a16_g128",
        },
        cost_s=20.0,
        value=76.5,
    ),
    bar(
        "gemm_w8a16.gemv",
        "w8a16, 8192 x 8192, M = 1: at least 75% of the measured bandwidth",
        ("gemm_w8a16",),
        OF_BANDWIDTH,
        {"op": "gemm_w8a16", "least": {f"{_PER_TOKEN},bias=false": _W8A16_SHARE}, "scheme": "w8a16"},
        cost_s=20.0,
        value=76.0,
    ),
    bar(
        "gemm_silu_and_mul.fused",
        "fused gate-up: geomean >= 1.05x the two library calls, prefill of Llama-3-8B and decode",
        ("gemm_silu_and_mul",),
        AGAINST_LIBRARY,
        {
            "op": "gemm_silu_and_mul",
            "cases": [f"M={M},I=14336,K=4096,layout=NT" for M in (16, 64, 2048, 8192)],
            "geomean": 1.05,
        },
        cost_s=35.0,
        value=75.0,
    ),
)
