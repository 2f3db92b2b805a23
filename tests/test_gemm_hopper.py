"""gemm in CUDA C++ and Gluon: what they refuse, layouts and rings in the emulator, and what their code needs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from test_ptx_mutants import asked

from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.bench.emulate.calls import call
from rooflab.bench.predict.cases import Target
from rooflab.bench.ptx.cuda_kernels import emulating_cuda
from rooflab.bench.ptx.launch import emulate
from rooflab.kernels.configs import legal_configs
from rooflab.kernels.gemm import cooperative, one_thread, shared_tiles
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

BF16 = SCHEMES["bf16"]
MODULES = {"one_thread": one_thread, "shared_tiles": shared_tiles, "cooperative": cooperative}
by_name = pytest.mark.parametrize("name", MODULES)


@by_name
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.ones(4).half()}, r"a: expected shape \(\*, \*\), got \(4,\)"),
        ({"b": torch.ones(5, 8).half()}, r"b: expected shape \(8, \*\), got \(5, 8\)"),
        ({"b": torch.ones(8, 8)}, "b: expected torch.float16, got torch.float32"),
        ({"a": torch.ones(2, 8, dtype=torch.int32)}, "a: expected torch.float32 or .*, got torch.int32"),
        ({"bias": torch.ones(4).half()}, r"bias: expected shape \(8\), got \(4,\)"),
        ({"residual": torch.ones(2, 4).half()}, r"residual: expected shape \(2, 8\), got \(2, 4\)"),
        ({"out": torch.ones(8, 2).half()}, r"out: expected shape \(2, 8\), got \(8, 2\)"),
        ({"out": torch.ones(8, 2).half().mT}, "out: expected stride 1"),
    ],
)
def test_refusals(name: str, change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODULES[name].gemm(**{"a": torch.ones(2, 8).half(), "b": torch.ones(8, 8).half(), **change})


@by_name
def test_nothing_is_launched_for_an_empty_result(name: str) -> None:
    assert MODULES[name].gemm(torch.ones(0, 8).half(), torch.ones(8, 8).half()).shape == (0, 8)
    assert MODULES[name].gemm(torch.ones(8, 8).half(), torch.ones(8, 0).half()).shape == (8, 0)


def test_without_a_k_the_addends_remain() -> None:
    bias, residual = torch.full((8,), 0.5).half(), torch.ones(3, 8).half()
    found = cooperative.gemm(torch.ones(3, 0).half(), torch.ones(0, 8).half(), bias, residual=residual)
    assert found.tolist() == [[1.5] * 8] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"a": torch.ones(16, 17).half()[:, :16]},
            "a: expected an address and row stride of whole 16 bytes .*pipelined",
        ),
        ({"a": torch.ones(16, 24).half()[:, 4:20]}, "a: expected an address .*pipelined takes any"),
        ({"b": torch.ones(16, 32).half()[:, ::2]}, "b: expected .*stride 1 along .*pipelined takes any"),
        ({"b": torch.ones(16, 12).half().mT.contiguous().mT}, "b: expected N of whole 16 bytes.*pipelined"),
        ({"residual": torch.ones(16, 20).half()[:, :16]}, "residual: expected an address and row stride.*pipelined"),
    ],
)
def test_what_tma_cannot_take_names_the_rung_that_does(changes: dict[str, torch.Tensor], message: str) -> None:
    inputs = {"a": torch.ones(16, 16).half(), "b": torch.ones(16, 16).half(), "bias": None, **changes}
    reason = get_kernel("gemm", "cooperative").why_not_args(inputs).reason
    assert re.search(message, reason)
    with pytest.raises(ValueError, match="expected .* whole 16 bytes"):
        cooperative.gemm(**inputs)


def test_an_out_that_tma_cannot_store_to_is_refused() -> None:
    out = torch.ones(16, 20).half()[:, :16]
    with pytest.raises(ValueError, match="out: expected an address and row stride of whole 16 bytes"):
        cooperative.gemm(torch.ones(16, 16).half(), torch.ones(16, 16).half(), out=out)


def test_fp32_is_rounded_to_tf32_by_name_alone() -> None:
    kernel = get_kernel("gemm", "cooperative")
    a, weight = torch.ones(16, 16), torch.ones(16, 16)
    assert "precision: expected tf32" in str(kernel.why_not_args({"a": a, "b": weight.mT}))
    assert kernel.why_not_args({"a": a, "b": weight.mT, "precision": "tf32"}) is None
    reason = kernel.why_not_args({"a": a, "b": weight, "precision": "tf32"}).reason
    assert "b: expected stride 1 along K" in reason and "pipelined" in reason
    assert get_kernel("gemm", "shared_tiles").why_not_args({"a": a, "b": weight}) is None


def test_the_heuristic_fills_the_sms() -> None:
    shape = lambda M, N, K: Case(M=M, N=N, K=K, layout="NT", bias=False)
    tile = lambda case: (found.block_m, found.block_n) if (found := cooperative.heuristic(case)) else None
    assert tile(shape(8192, 8192, 8192)) == (128, 256)
    assert tile(shape(1024, 2048, 4096)) == (128, 128), "128 tiles; 64 of the larger ones would leave SMs idle"
    deep, shallow = cooperative.heuristic(shape(8192, 8192, 8192)), cooperative.heuristic(shape(8192, 8192, 512))
    assert (deep.stages, deep.store_n) == (4, 128) and (shallow.stages, shallow.store_n) == (3, 256)


def test_a_lead_leaves_two_slots() -> None:
    case = Case(M=512, N=512, K=512, layout="NT", bias=False)
    config = cooperative.Config(128, 128, 64, stages=4, group_m=8, store_n=128)
    leads = [cooperative.is_legal(cooperative.Config(**{**asdict(config), "lead": lead}), case) for lead in range(5)]
    assert leads == [True, True, True, False, False]
    assert {config.lead for config in legal_configs(get_kernel("gemm", "cooperative"), case, BF16)} == {0, 1, 2, 4}


def _coop(m: int, n: int, k: int, stages: int, store_n: int, lead: int = 0) -> dict[str, int]:
    return {"block_m": m, "block_n": n, "block_k": k, "stages": stages, "group_m": 2, "store_n": store_n, "lead": lead}


@pytest.mark.parametrize(
    ("case", "scheme", "config"),
    [
        ("M=136,N=72,K=200,layout=NN,bias=true,residual=true", "bf16", _coop(128, 64, 64, 3, 64)),
        ("M=136,N=72,K=200,layout=TN,bias=true", "fp16", _coop(128, 64, 32, 6, 32, lead=4)),
        ("M=300,N=136,K=72,layout=NT,bias=false", "bf16", _coop(256, 128, 64, 3, 64, lead=1)),
        ("M=136,N=72,K=72,layout=NT,bias=true,residual=true", "tf32", _coop(128, 64, 32, 4, 32, lead=2)),
        ("M=200,N=520,K=136,layout=NT,bias=false", "bf16", _coop(128, 256, 64, 4, 128)),
    ],
)
def test_a_cta_goes_from_tile_to_tile_without_a_race(case: str, scheme: str, config: dict[str, int]) -> None:
    """All tiles on one SM, the ring round several times, in the order of the program and in drawn ones."""
    request = {"op": "gemm", "kernel": "cooperative", "cases": [case], "scheme": scheme, "config": config, "sms": 1}
    assert asked({**request, "seeds": [], "clean_seeds": [0, 1, 2], "only": []}) == {"clean": [], "mutants": []}


@pytest.mark.parametrize("scheme", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_shared_tiles_meet_no_bank_conflict(layout: str, scheme: str) -> None:
    case = Case(M=136, N=136, K=40, layout=layout, bias=True, residual=True)
    found = call(Target("gemm", "shared_tiles", case, SCHEMES[scheme])).answer
    assert found["status"] == "OK", found["reason"]
    (launch,) = found["launches"]
    assert launch["shared_wavefronts"] == launch["shared_wavefronts_least"] > 0


def _compiled(name: str, requests: list[tuple[Case, str, Any]]) -> None:
    """Nothing spills, and a CTA needs what its footprint says and a little more."""
    kernel = get_kernel("gemm", name)
    entries = [Request("gemm", name, case, SCHEMES[scheme], config=config) for case, scheme, config in requests]
    for request, found in zip(entries, compile_kernels(entries), strict=True):
        assert not isinstance(found, CompileFailure), f"{request}: {found}"
        (info,) = found
        assert info.stack_bytes == 0, f"{name} spills: {request.case.id} {request.scheme.name} {request.config}"
        if kernel.tuning.footprint is not None:
            size = kernel.tuning.footprint(
                request.config or kernel.tuning.heuristic(request.case), request.case, request.scheme
            )
            assert info.threads == size.threads and size.registers <= info.registers
            assert size.shared_bytes <= info.shared_bytes <= size.shared_bytes + cooperative.OVERHEAD_BYTES // 2


def test_nothing_spills() -> None:
    case = Case(M=4096, N=4096, K=4096, layout="NN", bias=True, residual=True)
    _compiled("shared_tiles", [(case.but(layout=layout), "fp32", None) for layout in ("NN", "NT", "TN")])
    _compiled("cooperative", [(case, "bf16", cooperative.Config(128, 256, 64, 3, 16, 256))])
    _compiled("cooperative", [(case.but(layout="TN"), "bf16", cooperative.Config(256, 128, 64, 4, 8, 64))])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
def test_nothing_spills_with_any_addend(layout: str) -> None:
    cases = [
        Case(M=4096, N=size, K=4096, layout=layout, bias=bias, residual=residual)
        for size, bias, residual in itertools.product((4096, 4095), (True, False), (True, False))
    ]
    _compiled("shared_tiles", [(case, scheme, None) for case in cases for scheme in ("bf16", "fp32")])
    largest = [
        config
        for config in legal_configs(get_kernel("gemm", "cooperative"), cases[0], BF16)
        if config.block_m * config.block_n == 2**15 and (config.block_k, config.group_m, config.lead) == (64, 8, 0)
    ]
    _compiled("cooperative", [(case, "bf16", config) for case in cases[:4] for config in largest])


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulating_cuda(lambda launch, grid, values: emulate(launch, grid, values)):  # type: ignore[arg-type,return-value]
        yield


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
def test_offsets_past_2_31(name: str, emulated: None) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    a = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    a.copy_(torch.arange(48).view(3, 16))
    expected = [[float(row.sum())] for row in a]
    gemm = MODULES[name].gemm
    assert gemm(a, torch.ones(16, 1, dtype=torch.float16)).tolist() == expected
    assert gemm(torch.ones(1, 16, dtype=torch.float16), a.mT).tolist() == [[row[0] for row in expected]]


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
def test_any_strides(name: str, emulated: None) -> None:
    """Views whose every other element is NaN, and an out in a wider buffer."""
    a = torch.full((34, 66), torch.nan)[::2, ::2]
    b = torch.full((66, 38), torch.nan)[::2, ::2]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 19))
    buffer = torch.full((19, 24), 7.0)
    out = MODULES[name].gemm(a, b, out=buffer[1:18, 3:22])
    torch.testing.assert_close(out, (a.double() @ b.double()).float())
    assert int((buffer == 7.0).sum()) == 19 * 24 - 17 * 19
    bias, residual = torch.ones(8), torch.ones(2, 8)
    found = MODULES[name].gemm(torch.ones(2, 0), torch.ones(0, 8), bias, residual=residual)
    assert found.tolist() == [[2.0] * 8] * 2, "without a K the addends remain"
