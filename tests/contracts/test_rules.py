"""If a launcher refuses a value, a dtype or an option, the reference refuses it too, because it would compute something
else; and the values that no kernel reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_kernels import CPU, refuses

from rooflab.bench.compile.pretended import pretended_gpu
from rooflab.kernels import _checks
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.attention import seen_keys
from rooflab.reference.spec import SCHEMES, Case, Inputs

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
ONE = torch.ones(1)
ATTENTION = [({"softcap": 0.0}, "softcap"), ({"softcap": -1.0}, "softcap"), ({"window": 0}, "window")]
SIZES = "H=4,H_kv=2,D=64,causal=true"
PAGED = "B=2,context=20,H=4,H_kv=2,D=64,block_size=16,ragged=false"
OPTIONS: list[tuple[str, str, str, list[tuple[dict[str, Any], str]]]] = [
    ("flash_attention", "fp16", f"B=1,T=5,S=5,{SIZES}", ATTENTION),
    ("flash_attention_varlen", "fp16", f"B=1,T=5,S=5,{SIZES}", [*ATTENTION, ({"max_seqlen_q": 4}, "max_seqlen_q")]),
    ("paged_attention", "fp16", PAGED, ATTENTION),
    ("paged_attention", "kv_fp8", PAGED, [({"k_cache": torch.ones(7, 16, 2, 64).to(E5M2)}, "k_cache")]),
    (
        "gemm_fp8",
        "fp8_e4m3",
        "M=2,N=16,K=128,scales=tensor,bias=true",
        [
            ({"a_scale": torch.ones(2, 1), "b_scale": torch.ones(1, 16)}, "b_scale"),
            ({"a_scale": torch.ones(2, 1)}, "b_scale"),
            ({"a_scale": torch.ones(2)}, "a_scale"),
            ({"a": torch.ones(2, 128).to(E5M2)}, "a"),
            ({"b": torch.ones(128, 16).to(FNUZ)}, "b"),
        ],
    ),
    (
        "flash_attention",
        "fp8_e4m3",
        f"B=1,T=5,S=5,{SIZES}",
        [
            ({"q": torch.ones(1, 5, 4, 64).to(E5M2)}, "q"),
            ({"k": torch.ones(1, 5, 2, 64).to(FNUZ)}, "k"),
            ({"v_scale": ONE.expand(1, 2).half()}, "v_scale"),
        ],
    ),
    (
        "mla_decode",
        "fp16",
        "B=2,context=20,H=2,latent=32,rotary=16,block_size=8,ragged=false",
        [({"latent_dim": 49}, "latent_dim"), ({"latent_dim": 0}, "latent_dim")],
    ),
    (
        "gemm",
        "fp16",
        "M=2,N=4,K=8,layout=NN,bias=true",
        [({"precision": "tf32"}, "precision"), ({"precision": "half"}, "precision"), ({"bias": ONE.half()}, "bias")],
    ),
    *(
        (op, "fp32", sizes, [({"quantize": "int4"}, "quantize")])
        for op, sizes in (
            ("rmsnorm", "T=2,H=8,eps=1e-6"),
            ("fused_add_rmsnorm", "T=2,H=8,eps=1e-6"),
            ("silu_and_mul", "T=2,I=8"),
            ("gelu_and_mul", "T=2,I=8"),
        )
    ),
]
"""Of a lawful case the changes that are refused, and the argument that the refusal names."""


def inputs_of(op: str, scheme: str, case: str) -> Inputs:
    spec = get_op(op)
    return spec.make_inputs(spec.check_case(Case.parse(case)), SCHEMES[scheme], CPU, 0)


@pytest.mark.parametrize(("op", "scheme", "case", "changes"), OPTIONS)
def test_a_reference_refuses_what_launchers_do(op: str, scheme: str, case: str, changes: Any) -> None:
    inputs = inputs_of(op, scheme, case)
    get_op(op).reference(**inputs)
    for call in (get_op(op).reference, get_kernel(op, "naive").fn):
        refuses(call, lambda: inputs, [(change, f"^{name}: expected ") for change, name in changes])


def test_a_window_of_queries_that_see_all_keys_is_refused() -> None:
    refuses(seen_keys, lambda: {"T": 3, "S": 3, "window": 2, "causal": False}, [({}, "^window: expected ")])


CACHE = "T=6,H_kv=2,D=16,num_blocks=3,block_size=4,skipped=0"
ROPE = "T=6,H=4,H_kv=2,D=16,max_position=50,interleaved=false"
ROPE_CACHE = f"{ROPE},rotary=16,num_blocks=3,block_size=4,skipped=0"
GROUPED = "T=6,top_k=1,E=3,N=8,K=8,skew=0.0"
CHUNKS = "B=2,context=20,H=2,H_kv=1,D=16,block_size=8,ragged=false,queries=3"
LATENTS = "B=2,context=20,H=2,latent=32,rotary=16,block_size=8,ragged=false"
VALUES: list[tuple[str, str, str, Any, int, str]] = [
    ("kv_cache_write", CACHE, "slot_mapping", 1, 12, "values from -1 to 11, got .* to 12"),
    ("kv_cache_write", CACHE, "slot_mapping", slice(2), 3, "each slot at most once, got 3 again"),
    ("rope_and_cache", ROPE_CACHE, "slot_mapping", 1, -2, "values from -1 to 11, got -2 to "),
    ("rope_and_cache", ROPE_CACHE, "slot_mapping", slice(2), 3, "each slot at most once, got 3 again"),
    ("rope_and_cache", ROPE_CACHE, "positions", 1, 50, "values from 0 to 49, got .* to 50"),
    ("rope_and_cache", ROPE_CACHE, "positions", 1, -1, "values from 0 to 49, got -1 to "),
    ("rope", ROPE, "positions", 1, -1, "values from 0 to 49, got -1 to "),
    ("rope", ROPE, "positions", 1, 50, "values from 0 to 49, got .* to 50"),
    ("embedding", "T=6,V=50,H=16", "token_ids", 1, -1, "values from 0 to 49, got -1 to "),
    ("gemm_grouped", GROUPED, "offsets", 3, 5, r"offsets from 0 to 6 that never fall, got \[0, .*, 5\]"),
    ("gemm_grouped", GROUPED, "offsets", 0, 1, "offsets from 0 to 6 that never fall"),
    ("gemm_grouped", GROUPED, "offsets", 1, 7, "offsets from 0 to 6 that never fall"),
    ("paged_attention", CHUNKS, "seq_lens", 1, 33, r"0 to 32, which block_table has room for, got \[20, 33\]"),
    ("paged_attention", CHUNKS, "seq_lens", 0, -1, "0 to 32"),
    ("paged_attention", CHUNKS, "block_table", (1, 2), 9, "pages below 9 up to each length, got 9"),
    ("paged_attention", CHUNKS, "block_table", (0, 0), -1, "pages below 9 up to each length, got -1"),
    ("paged_attention", CHUNKS, "cu_seqlens_q", 2, 7, r"offsets from 0 to 6 that never fall, got \[0, 3, 7\]"),
    ("paged_attention", CHUNKS, "cu_seqlens_q", 2, 5, "offsets from 0"),
    ("paged_attention", CHUNKS, "cu_seqlens_q", 1, 7, "offsets from 0"),
    ("paged_attention", CHUNKS, "cu_seqlens_q", 0, 1, "offsets from 0"),
    ("mla_decode", LATENTS, "block_table", (0, 0), 99, "pages below 9 up to each length, got 99"),
]


@pytest.mark.parametrize(("op", "case", "name", "index", "value", "message"), VALUES)
def test_a_kernel_that_is_asked_to_and_the_reference_always_name_what_is_out_of_place(
    monkeypatch, op, case, name, index, value, message
):
    inputs = inputs_of(op, get_op(op).schemes[0], case)
    inputs[name][index] = value
    monkeypatch.setattr(_checks, "CHECK_VALUES", True)
    for call in (get_op(op).reference, get_kernel(op, "naive").fn):
        with pytest.raises(ValueError, match=f"^{name}: expected {message}"):
            call(**inputs)


def test_what_no_query_sees_may_be_anything():
    paged, changed = get_kernel("paged_attention", "chunked"), {}
    for name, place in (("usual", None), ("behind the length", (0, 3)), ("of no query", (1, 0)), ("freed", (0, 0))):
        changed[name] = inputs_of("paged_attention", "fp32", CHUNKS)
        if place is not None:
            changed[name]["block_table"][place] = -1
    changed["of no query"]["cu_seqlens_q"][2] = 3
    changed["of no query"]["q"] = changed["of no query"]["q"][:3]
    changed["freed"]["window"] = 10
    for inputs in changed.values():
        paged.fn(**inputs)
    with pytest.raises(ValueError, match="block_table: expected pages"):
        paged.fn(**changed["freed"] | {"window": 11})
    latents = inputs_of("mla_decode", "fp16", LATENTS)
    latents["block_table"][0, 3] = 99
    get_kernel("mla_decode", "naive").fn(**latents)


def test_nothing_is_read_on_a_gpu_unless_it_is_asked_for(monkeypatch):
    table = torch.zeros(1, 1, dtype=torch.int32)
    for asked in (False, True):
        monkeypatch.setattr(_checks, "CHECK_VALUES", asked)
        assert _checks.checks_bounds(table) and not _checks.checks_values(table.to("meta"))
        with pretended_gpu():
            assert _checks.checks_bounds(table) is asked and _checks.checks_values(table) is asked
