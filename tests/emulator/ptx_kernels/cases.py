"""The corpus by name.  Imports no kernel, so that a process with Triton's interpreter can list the cases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    module: str
    maker: str
    """A function of `module` that takes a seed and `options` and returns a `Trial`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    asynchronous: bool = True
    """Whether copies or specialised warps make another order worth trying."""
    reported: str = ""
    """What every report about the kernel says, where Triton's own code is not what the PTX ISA asks for."""
    uninitialised: bool = True
    """Whether to look for reads of memory that nobody wrote."""


def _tma(**options: Any) -> Case:
    return Case("triton_matmul", "tma", options)


def _pointers(**options: Any) -> Case:
    return Case("triton_matmul", "pointers", options)


def _copies(maker: str, **options: Any) -> Case:
    return Case("triton_copies", maker, options)


def _dot(**options: Any) -> Case:
    return Case("triton_copies", "dot", options, asynchronous=False)


def _vectors(maker: str, **options: Any) -> Case:
    return Case("triton_vectors", maker, options, asynchronous=False)


CASES: dict[str, Case] = {
    "tma_NT_bf16": _tma(),
    "tma_e4m3": _tma(dtype="e4m3"),
    "tma_tf32": _tma(dtype="fp32", BK=32),
    "tma_device_NT": _tma(on_device=True),
    "tma_swizzle_32": _tma(BK=16, trans="NN"),
    "tma_swizzle_64": _tma(BK=32, trans="TN"),
    "tma_TT_ragged": _tma(M=152, N=88, K=232, BN=64, trans="TT", dtype="fp16", warps=8),
    "tma_TN_flattened": _tma(M=256, N=72, K=72, BN=32, trans="TN", programs=2, stages=4, flatten=True),
    "outer_ws_on_device": _tma(BM=64, BN=64, trans="NN", outer_ws=True, on_device=True, programs=1, stages=2),
    "tma_2_ctas": _tma(ctas=2, programs=0),
    "ws_64_persistent": _tma(ws=True, BM=64, stages=2),
    "pointers_3_stages": _pointers(),
    "pointers_int8": _pointers(dtype="int8", trans="NT", BK=64),
    "pointers_TT_8_warps": _pointers(M=120, N=200, K=104, BN=256, BK=64, trans="TT", dtype="bf16", warps=8, stages=1),
    "pointers_e5m2": _pointers(dtype="e5m2", trans="NT", BK=64, BM=64, stages=4),
    "pointers_2_ctas": _pointers(ctas=2),
    **{
        f"tma_{what}_{dtype}": _copies("reduces", what=what, dtype=dtype)
        for what, dtype in (("add", "float32"), ("add", "bfloat16"), ("min", "float16"), ("xor", "int32"))
    },
    **{f"tma_rank_{rank}": _copies("move", rank=rank) for rank in (1, 2, 4, 5)},
    "tma_rank_3_fp16_nan": _copies("move", rank=3, dtype="float16", padding="nan"),
    "tma_rank_2_int8": _copies("move", dtype="int8"),
    "dot_fp16_sum": _dot(out="float16", K=16),
    "dot_tf32x3": _dot(dtype="fp32", precision="tf32x3", relative=2e-6),
    "dot_tf32": _dot(dtype="fp32", relative=2e-3),
    # ptxas waits before those reads by itself (its note C7517).
    "dot_e4m3_imprecise": Case(
        "triton_copies", "dot", {"dtype": "e4m3", "K": 128, "imprecise": 32}, reported="puts one there, note C7517"
    ),
    "dot_small": _dot(M=16, N=16, K=16, warps=1),
    "dot_8_warps": _dot(M=128, N=32, K=32, warps=8),
    "arguments": _vectors("arguments"),
    "sort_int64_down": _vectors("sort", dtype="int64", N=512, down=True, warps=16),
    "sort_fp16_1_warp": _vectors("sort", dtype="float16", N=64, warps=1),
    "scan_back": _vectors("scan", back=True, R=32, N=32, warps=2),
    "reduce_16_warps": _vectors("reduce", R=2, N=4096, warps=16),
    # Both halves of the warps hold the same rows, and each stores its sums: lanes' sums of squares differ by rounding.
    "reduce_more_warps_than_rows": Case(
        "triton_vectors",
        "reduce",
        {"R": 4, "N": 16, "warps": 8},
        asynchronous=False,
        reported="values to one address that differ by rounding",
    ),
    # Triton 3.7 reads the other CTA's part of its own memory, and does not use what it finds.
    "reduce_2_ctas": Case("triton_vectors", "reduce", {"R": 8, "N": 512, "ctas": 2}, uninitialised=False),
}
"""One of each kind of copy, product, layout and order that Triton compiles."""
