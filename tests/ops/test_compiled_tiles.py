"""Compiled code beyond the cases of the specs: CTAs that go from tile to tile, shares of K and odd heads, in the
emulator; and the registers and shared memory of tiles."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_sizes import assert_is_its_footprint, compiled
from op_kernels import check_emulated, slow
from ptx_processes import asked

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.sass_flow import hot_loop
from rooflab.bench.core.outside import CheckTask
from rooflab.bench.emulate.calls import call
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, get_scheme


def case_of(op: str, text: str) -> Case:
    return get_op(op).check_case(Case.parse(text))


FEW_ROWS = [
    ("swap_ab", "M=2,N=16,K=0,layout=NT,bias=true", "bf16"),
    ("split_k", "M=5,N=72,K=1030,layout=NT,bias=false,residual=true", "bf16"),
    ("stream_k", "M=5,N=72,K=530,layout=NT,bias=false,residual=true", "bf16"),
]
PAGES = [
    ("tma_pages", "B=1,context=70,H=3,H_kv=1,D=80,block_size=8,ragged=false,queries=12,window=25", "bf16"),
    (
        "tma_pages",
        "B=3,context=140,H=2,H_kv=1,D=64,block_size=16,ragged=true,mixed=true,queries=70,sinks=true,lse=true",
        "bf16",
    ),
]
MORE_PAGES = [
    ("tma_pages", "B=1,context=65,H=2,H_kv=1,D=192,block_size=64,ragged=false,queries=64,lse=true", "fp16"),
    ("tma_pages", "B=1,context=130,H=16,H_kv=1,D=256,block_size=128,ragged=false,queries=9,softcap=15.0", "fp16"),
]


@pytest.mark.more
@pytest.mark.parametrize(
    ("op", "runs"), [("gemm", FEW_ROWS), ("paged_attention", PAGES), slow("paged_attention", MORE_PAGES)]
)
def test_shares_of_k_odd_heads_and_pages_are_right_and_race_nowhere(op, runs):
    tasks = [
        CheckTask(get_kernel(op, name), case_of(op, case), get_scheme(scheme), planted=False)
        for name, case, scheme in runs
    ]
    found = check_emulated(tasks)
    assert {(result.status, result.checked_by) for result in found} == {("OK", "emulator")}, found


ADDENDS = "bias=true,residual=true"
WALKS = [
    # 220 tiles, of which whole ones, parts, and halves without rows.
    ("gemm_grouped", "cooperative", "T=1200,top_k=2,E=6,N=5120,K=136,skew=0.7", "bf16", None),
    ("gemm_silu_and_mul", "cooperative", "M=256,I=8704,K=264,layout=NT", "fp16", (128, 64, 64, 6)),
    slow("gemm_silu_and_mul", "persistent", "M=256,I=8704,K=136,layout=NT", "bf16", None),
    # An odd N, which TMA cannot store.
    slow("gemm_fp8", "promoted_ws", "M=64,N=2233,K=144,scales=tensor,bias=false", "fp8_e4m3", (128, 16, 3)),
    slow("gemm", "persistent", f"M=768,N=400,K=72,layout=NT,{ADDENDS}", "bf16", (64, 32, 64, 4, 2)),
    slow("gemm", "warp_specialized", f"M=1550,N=400,K=72,layout=NN,{ADDENDS}", "bf16", (128, 32, 64, 4, 2)),
]
"""More tiles than the 132 SMs of an H100, so that CTAs come to a second one."""


def emulated(op: str, name: str, case: str, scheme: str, config: tuple[int, ...] | None, **how: Any) -> dict[str, Any]:
    """What the emulator says of a call, which must be right and race nowhere."""
    made = get_kernel(op, name).tuning.config_type(*config) if config else None
    answer = call(KernelCase(op, name, case_of(op, case), get_scheme(scheme), None, made), **how).answer
    assert answer["status"] == "OK", answer["reason"]
    return answer


@pytest.mark.more
@pytest.mark.parametrize(("op", "name", "case", "scheme", "config"), WALKS)
def test_a_cta_walks_over_several_tiles(op, name, case, scheme, config):
    """The first and the last CTA: values, and no race from one tile to the next, in two orders of the warps."""
    for schedule in (0, 3):
        assert emulated(op, name, case, scheme, config, sample=0, schedule=schedule)["of"] == 132


@pytest.mark.more
@pytest.mark.parametrize(
    ("op", "name", "case", "scheme", "config"),
    [
        ("gemm", "shared_tiles", f"M=128,N=128,K=24,layout=NN,{ADDENDS}", "bf16", None),
        slow("gemm", "shared_tiles", f"M=128,N=128,K=24,layout=TN,{ADDENDS}", "fp32", None),
        ("gemm_fp8", "promoted_ws", "M=200,N=264,K=272,scales=block,bias=true", "fp8_e4m3", (192, 128, 3)),
    ],
)
def test_tiles_meet_no_bank_conflict(op, name, case, scheme, config):
    (launch,) = emulated(op, name, case, scheme, config)["launches"]
    assert launch["shared_wavefronts"] == launch["shared_wavefronts_least"] > 0


RINGS = [
    ("gemm", "cooperative", f"M=136,N=72,K=136,layout=NN,{ADDENDS}", "bf16", (128, 64, 64, 3, 2, 64), 1),
    ("gemm", "cooperative", "M=136,N=72,K=104,layout=TN,bias=true", "fp16", (128, 64, 32, 6, 2, 32), 1),
    slow("gemm", "cooperative", "M=200,N=520,K=136,layout=NT,bias=false", "bf16", (128, 256, 64, 4, 2, 128), 1),
    (
        "flash_attention",
        "persistent",
        "B=1,T=130,S=200,H=1,H_kv=1,D=64,causal=true,window=100",
        "bf16",
        (64, 32, 4, 2, 1),
        1,
    ),
    ("flash_attention", "ping_pong", "B=1,T=140,S=330,H=2,H_kv=1,D=64,causal=true,lse=true", "bf16", (64, 2, 2), 1),
    (
        "flash_attention",
        "ping_pong",
        "B=1,T=210,S=350,H=2,H_kv=1,D=64,causal=true,window=190,softcap=20.0,sinks=true,lse=true",
        "bf16",
        (64, 2, 3),
        1,
    ),
    slow("flash_attention", "packed_gqa", "B=1,T=20,S=230,H=3,H_kv=1,D=64,causal=true", "bf16", (64, 32, 4, 3), 132),
    slow("flash_attention", "ping_pong", "B=2,T=60,S=200,H=2,H_kv=2,D=256,causal=false", "fp16", (64, 2, 2), 1),
]


@pytest.mark.more
@pytest.mark.parametrize(("op", "name", "case", "scheme", "config", "sms"), RINGS)
def test_no_race_whatever_the_order_of_warps(op, name, case, scheme, config, sms):
    """All tiles on one SM, the rings round several times, in the order of the program and in a drawn one."""
    made = vars(get_kernel(op, name).tuning.config_type(*config))
    request = {"op": op, "kernel": name, "cases": [case], "scheme": scheme, "config": made, "sms": sms}
    assert asked({**request, "seeds": [], "clean_seeds": [0, 1], "only": []}) == {"clean": [], "mutants": []}


LARGE = f"M=4096,N=4096,K=4096,layout=NT,{ADDENDS}"
HEADS = "B=1,T=2048,S=2048,H=32,H_kv=8,causal=true,D="
SIZES = [
    ("gemm", "shared_tiles", LARGE, "fp32", None),
    ("gemm", "cooperative", LARGE, "bf16", (128, 256, 64, 3, 16, 256)),
    ("gemm", "multicast", LARGE, "bf16", None),
    ("gemm", "persistent", LARGE, "bf16", None),
    slow("gemm_fp8", "multicast", "M=8192,N=8192,K=8192,scales=tensor,bias=true", "fp8_e4m3", None),
    ("flash_attention", "persistent", f"{HEADS}64", "bf16", None),
    ("flash_attention", "ping_pong", f"{HEADS}64", "bf16", (128, 4, 3)),
    *(slow("flash_attention", name, f"{HEADS}128", "bf16", None) for name in ("masked_tiles", "tma", "packed_gqa")),
    ("flash_attention", "fp8", f"{HEADS}128,v_columns=true", "fp8_e4m3", None),
    ("flash_attention", "fp8", f"{HEADS}128", "fp8_e4m3", None),
    slow("flash_attention", "fp8", f"{HEADS}256", "fp8_e4m3", None),
]


@pytest.mark.more
@pytest.mark.parametrize(("op", "name", "case", "scheme", "config"), SIZES)
def test_nothing_spills_in_a_loop_of_products_and_a_cta_needs_what_its_footprint_says(op, name, case, scheme, config):
    made = get_kernel(op, name).tuning.config_type(*config) if config else None
    ((request, info),) = compiled([KernelCase(op, name, case_of(op, case), get_scheme(scheme), config=made)])
    if op == "flash_attention" or name == "cooperative":
        assert_is_its_footprint(request, info)
    loop = hot_loop(info.loops)
    assert loop is not None and loop.counts["spill_load"] == loop.counts["spill_store"] == 0
    assert op == "flash_attention" or info.stack_bytes == 0
    assert name != "persistent" or op == "gemm" or info.registers <= 128, "two CTAs an SM"
