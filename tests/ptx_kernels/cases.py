"""The corpus by name.  Imports no kernel, so that a process with Triton's interpreter can ask what there is."""

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
    """Whether copies or specialised warps make other orders worth trying."""
    reported: str = ""
    """What every report about the kernel says, where Triton's own code is not what the PTX ISA asks for."""
    uninitialised: bool = True
    """Whether to look for reads of memory that nobody wrote."""


def _tma(**options: Any) -> Case:
    return Case("triton_matmul", "tma", options)


def _pointers(**options: Any) -> Case:
    return Case("triton_matmul", "pointers", options)


def _gluon(maker: str = "tma_ring", **options: Any) -> Case:
    return Case("gluon_matmul", maker, options)


def _more(maker: str, **options: Any) -> Case:
    return Case("gluon_more", maker, options)


def _flash(**options: Any) -> Case:
    return Case("triton_attention", "flash", options)


def _split(maker: str, **options: Any) -> Case:
    return Case("triton_split", maker, options)


def _copies(maker: str, **options: Any) -> Case:
    return Case("triton_copies", maker, options)


def _language(maker: str, **options: Any) -> Case:
    return Case("triton_language", maker, options, asynchronous=False)


def _vectors(maker: str, **options: Any) -> Case:
    return Case("triton_vectors", maker, options, asynchronous=False)


CASES: dict[str, Case] = {
    **{f"tma_{trans}_{dtype}": _tma(trans=trans, dtype=dtype) for trans in ("NN", "NT", "TN", "TT")
       for dtype in ("bf16", "fp16")},
    **{f"tma_{dtype}": _tma(trans="NT", dtype=dtype, BK=64) for dtype in ("e4m3", "e5m2")},
    "tma_tf32": _tma(trans="NT", dtype="fp32", BK=32),
    "tma_device_NN": _tma(on_device=True, trans="NN"),
    "tma_device_NT": _tma(on_device=True, trans="NT"),
    "tma_device_TT": _tma(on_device=True, trans="TT", programs=1),
    "tma_flatten": _tma(flatten=True),
    "tma_ragged": _tma(M=120, N=144, K=136),
    "tma_narrow": _tma(BM=64, BN=16, BK=16, M=64, N=48, K=64),
    "tma_8_warps": _tma(warps=8),
    "tma_1_stage": _tma(stages=1),
    "tma_4_stages": _tma(stages=4, K=512),
    "ws_64": _tma(ws=True, programs=0, BM=64),
    "ws_64_persistent": _tma(ws=True, programs=1, BM=64, stages=2),
    "ws_64_fp16_TN": _tma(ws=True, programs=0, BM=64, trans="TN", dtype="fp16"),
    "ws_outer": _tma(outer_ws=True, programs=1, BM=64),
    "ws_flatten": _tma(outer_ws=True, programs=1, flatten=True),
    "ws_device_outer": _tma(outer_ws=True, on_device=True, programs=1),
    "ws_device_flatten": _tma(outer_ws=True, on_device=True, programs=1, flatten=True),
    "ws_device": _tma(ws=True, on_device=True, programs=0),
    "ws_8_warps": _tma(ws=True, programs=0, warps=8),
    "tma_2_ctas": _tma(ctas=2, programs=0),
    **{f"pointers_{stages}_stages": _pointers(stages=stages) for stages in (1, 2, 3, 4)},
    "pointers_TN": _pointers(trans="TN"),
    "pointers_NT_8_warps": _pointers(trans="NT", warps=8),
    "pointers_TT_bf16": _pointers(trans="TT", dtype="bf16"),
    "pointers_tf32": _pointers(dtype="fp32"),
    "pointers_e4m3": _pointers(dtype="e4m3", trans="NT", BK=64),
    "pointers_int8": _pointers(dtype="int8", trans="NT", BK=64),
    "pointers_2_ctas": _pointers(ctas=2),
    "gluon_ring": _gluon(),
    "gluon_ring_NN": _gluon(trans="NN"),
    "gluon_ring_8_warps": _gluon(BM=128, warps=8, stages=4),
    "gluon_ring_e4m3": _gluon(dtype="e4m3", BK=128),
    "gluon_ring_ragged": _gluon(M=200, N=120, K=200),
    "gluon_ring_tf32": _gluon(dtype="fp32", BK=32),
    "gluon_specialised": _gluon(specialise=True),
    "gluon_specialised_8_warps": _gluon(specialise=True, BM=128, warps=8, registers=24),
    "gluon_specialised_2_stages": _gluon(specialise=True, stages=2, dtype="fp16", trans="NN"),
    "gluon_cp_async": _gluon("cp_async"),
    "gluon_cp_async_4_stages": _gluon("cp_async", stages=4, dtype="bf16", BK=32),
    "gluon_two_consumers": _more("consumers"),
    "gluon_a_in_registers": _more("registers"),
    "gluon_copies_that_arrive": _more("arrivals"),
    "gluon_mma_sync": _more("mma"),
    "gluon_in_and_out": _more("doubles"),
    "gluon_in_and_out_bf16": _more("doubles", dtype="bf16", BN=32),
    "gluon_multicast": Case("gluon_cluster", "multicast"),
    "gluon_cluster": Case("gluon_cluster", "multicast", {"multicast": False}),
    "flash_tma": _flash(),
    "flash_tma_causal": _flash(causal=True, queries=128, keys=128),
    "flash_tma_fp16_128": _flash(D=128, dtype="fp16", BM=128, BN=64, warps=8, stages=3),
    "flash_tma_ragged": _flash(D=32, queries=100, keys=150),
    "flash_pointers": _flash(by_tma=False),
    "flash_pointers_ragged": _flash(by_tma=False, queries=70, keys=90, D=16, BN=32),
    "flash_ws": _flash(ws=True),
    "backward": Case("triton_backward", "attention"),
    "backward_fp16_8_warps": Case("triton_backward", "attention", {"dtype": "fp16", "BN": 128, "warps": 8}),
    "backward_ws": Case("triton_backward", "attention", {"ws": True}),
    "norm": Case("triton_backward", "norm", asynchronous=False),
    "split_k_atomics": _split("atomics"),
    "split_k_last": _split("last"),
    "flags": _split("flags"),
    **{f"tma_{what}_{dtype}": _split("tma_reduces", what=what, dtype=dtype) for what, dtype in (
        ("add", "float32"), ("add", "bfloat16"), ("add", "float16"), ("max", "int32"), ("min", "float16"),
        ("max", "bfloat16"), ("and", "int32"), ("or", "int32"), ("xor", "int32"), ("add", "int32"))},
    **{f"tma_rank_{rank}": _copies("move", rank=rank) for rank in (1, 2, 3, 4, 5)},
    "tma_rank_3_fp16_nan": _copies("move", rank=3, dtype="float16", padding="nan"),
    "tma_rank_2_int8": _copies("move", dtype="int8"),
    "dot_fp16_sum": _copies("dot", out="float16", K=16),
    "dot_tf32x3": _copies("dot", dtype="fp32", precision="tf32x3", relative=2e-6),
    "dot_ieee": _copies("dot", dtype="fp32", precision="ieee", M=32, N=32, K=32, relative=2e-6),
    "dot_tf32": _copies("dot", dtype="fp32", relative=2e-3),
    # ptxas waits before those reads by itself (its note C7517).
    "dot_e4m3_imprecise": Case("triton_copies", "dot", {"dtype": "e4m3", "K": 128, "imprecise": 32},
                               reported="reads an accumulator of a wgmma that may still be running"),
    "dot_e5m2": _copies("dot", dtype="e5m2"),
    "dot_small": _copies("dot", M=16, N=16, K=16, warps=1),
    "dot_8_warps": _copies("dot", M=128, N=32, K=32, warps=8),
    "dot_batched": _copies("batch"),
    "dot_scaled": _copies("scale"),
    "narrow_bf16": _language("narrow"),
    "narrow_fp16": _language("narrow", dtype="fp16"),
    **{f"convert_{source}_{dtype}": _language("convert", source=source, dtype=dtype) for source, dtype in (
        ("fp32", "e4m3"), ("fp32", "e5m2"), ("fp16", "e4m3"), ("bf16", "e5m2"), ("fp32", "bf16"), ("e4m3", "fp16"))},
    "convert_integers": _language("convert_integers"),
    "four_bits": _language("four_bits"),
    "mixed_e4m3_fp16": _language("mixed"),
    "mixed_e5m2_bf16": _language("mixed", dtype="e5m2", wide="bf16"),
    "mixed_int8_bf16": _language("mixed", dtype="int8", wide="bf16"),
    "flow": _language("flows"),
    "locks": _language("locks"),
    "libdevice": _language("libraries"),
    "assembly": _language("inline"),
    "fp64": _language("double"),
    "printing": _language("printing"),
    "arguments": _language("argument"),
    "tuned": _language("tune"),
    "tma_device_2_ctas": _tma(on_device=True, ctas=2, programs=0),
    "sort": _vectors("sort"),
    "sort_down": _vectors("sort", down=True, dtype="int32", N=512),
    "sort_fp16_1_warp": _vectors("sort", dtype="float16", N=64, warps=1),
    "top": _vectors("top"),
    "scan": _vectors("scan"),
    "scan_back": _vectors("scan", back=True, R=32, N=32, warps=2),
    "reduce": _vectors("reduce"),
    "reduce_16_warps": _vectors("reduce", R=2, N=4096, warps=16),
    # Triton 3.7 reads the other CTA's part of its own memory, and does not use what it finds.
    "reduce_2_ctas": Case("triton_vectors", "reduce", {"R": 8, "N": 512, "ctas": 2}, uninitialised=False),
    "random": _vectors("random"),
    "histogram": _vectors("histogram"),
    "integer_atomics": _vectors("atomics"),
    "quantise_e4m3": _vectors("quantise"),
    "quantise_e5m2": _vectors("quantise", dtype="e5m2"),
    "functions": _vectors("function"),
    "integers": _vectors("integer"),
    "turn": _vectors("turn"),
}  # fmt: skip
SLOW = frozenset({
    "tma_NN_fp16", "tma_TN_fp16", "tma_TT_fp16", "tma_device_TT", "ws_flatten", "ws_device_flatten", "ws_8_warps",
    "pointers_2_stages", "pointers_TT_bf16", "flash_pointers", "flash_pointers_ragged", "tma_8_warps", "tma_device_NN",
    "tma_device_2_ctas", "gluon_ring_8_warps", "gluon_cp_async_4_stages", "ws_outer", "ws_device_outer",
    "backward_fp16_8_warps", "pointers_NT_8_warps",
})  # fmt: skip
"""Those that differ least from others: only in `make test-full`."""
NEW = frozenset({"gluon_cp_async", "gluon_cp_async_4_stages", "gluon_multicast", "gluon_cluster"})
"""Those that are written for Triton 3.7."""
