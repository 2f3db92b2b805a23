"""What a launcher refuses because of its dtype or range, the reference, which would take it for something else,
refuses in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU, refuses

from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
ONE = torch.ones(1)
ATTENTION = [
    ({"softcap": 0.0}, "softcap: expected more than 0, got 0.0"),
    ({"softcap": -1.0}, "softcap: expected more than 0, got -1.0"),
    ({"window": 0}, "window: expected at least 1"),
]
SIZES = "H=4,H_kv=2,D=64,causal=true"
CASES: list[tuple[str, str, str, list[tuple[dict[str, Any], str]]]] = [
    (
        "gemm_fp8",
        "fp8_e4m3",
        "M=2,N=16,K=128,scales=tensor,bias=true",
        [
            ({"a_scale": torch.ones(2, 1), "b_scale": torch.ones(1, 16)}, r"b_scale: expected shape \(1, 1\), got"),
            ({"a_scale": torch.ones(2, 1)}, r"b_scale: expected shape \(1, 1\), got \(\)"),
            ({"a_scale": torch.ones(2)}, r"a_scale: expected one element, shape \(\) or \(1,\), got \(2,\)"),
            ({"a": torch.ones(2, 128).to(E5M2)}, f"a: expected {E4M3}, got {E5M2}"),
            ({"b": torch.ones(128, 16).to(FNUZ)}, f"b: expected {E4M3}, got {FNUZ}"),
        ],
    ),
    ("flash_attention", "fp16", f"B=1,T=5,S=5,{SIZES}", ATTENTION),
    (
        "flash_attention",
        "fp8_e4m3",
        f"B=1,T=5,S=5,{SIZES}",
        [
            ({"q": torch.ones(1, 5, 4, 64).to(E5M2)}, f"q: expected .*, got {E5M2}"),
            ({"k": torch.ones(1, 5, 2, 64).to(FNUZ)}, f"k: expected {E4M3}, got {FNUZ}"),
            ({"v_scale": ONE.expand(1, 2).half()}, "v_scale: expected torch.float32, got torch.float16"),
        ],
    ),
    ("flash_attention_varlen", "fp16", f"B=1,T=5,S=5,{SIZES}", [*ATTENTION, ({"max_seqlen_q": 4}, "max_seqlen_q: ")]),
    ("paged_attention", "fp16", "B=2,context=20,H=4,H_kv=2,D=64,block_size=16,ragged=false", ATTENTION),
    (
        "paged_attention",
        "kv_fp8",
        "B=2,context=20,H=4,H_kv=2,D=64,block_size=16,ragged=false",
        [({"k_cache": torch.ones(7, 16, 2, 64).to(E5M2)}, f"k_cache: expected .*{E4M3}, got {E5M2}")],
    ),
    (
        "mla_decode",
        "fp16",
        "B=2,context=20,H=2,latent=32,rotary=16,block_size=8,ragged=false",
        [({"latent_dim": 49}, "latent_dim: expected 1 to 48"), ({"latent_dim": 0}, "latent_dim: expected 1 to 48")],
    ),
    (
        "gemm",
        "fp16",
        "M=2,N=4,K=8,layout=NN,bias=true",
        [
            ({"precision": "tf32"}, "precision: expected ieee with torch.float16 operands, got tf32"),
            ({"precision": "half"}, "precision: expected ieee or tf32, got 'half'"),
            ({"bias": ONE.half()}, r"bias: expected shape \(N=4\), got \(1,\)"),
        ],
    ),
    (
        "fused_add_rmsnorm",
        "fp32",
        "T=2,H=8,eps=1e-6",
        [({"quantize": "fp8_e5m2"}, "quantize: expected None, 'int8' or 'fp8_e4m3', got 'fp8_e5m2'")],
    ),
]


@pytest.mark.parametrize(("op", "scheme", "case", "changes"), CASES)
def test_a_reference_refuses_what_launchers_do(op: str, scheme: str, case: str, changes: Any) -> None:
    spec = get_op(op)
    inputs = spec.make_inputs(spec.check_case(Case.parse(case)), SCHEMES[scheme], CPU, 0)
    spec.reference(**inputs)
    for call in (spec.reference, get_kernel(op, "naive").fn):
        refuses(call, lambda: inputs, changes)
