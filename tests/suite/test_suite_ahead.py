"""What later entries launch is compiled ahead, and their launches find it in the compilers' caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rooflab.bench.core.process import Child
from rooflab.bench.suite import ahead
from rooflab.bench.suite.plan import make_plan
from rooflab.kernels import registry

TESTS = Path(__file__).parent
CASES = {
    "gemm": "M=64,N=256,K=128,layout=NT,bias=false",
    "rmsnorm": "T=4,H=256,eps=1e-05",
    "paged_attention": "B=2,context=64,H=4,H_kv=2,D=64,block_size=16,ragged=true",
}
RUNGS = {"gemm": ["tma"], "rmsnorm": [], "paged_attention": ["split_kv"]}


@pytest.mark.more
def test_launches_on_guarded_tensors_compile_nothing_anew(tmp_path: Path) -> None:
    folders = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "ROOFLAB_CACHE": str(tmp_path / "own")}
    variables = {"TRITON_INTERPRET": None, **folders, "PYTHONPATH": str(TESTS)}

    def code() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.suffix in (".cubin", ".ttir")}

    with Child(ahead.ITSELF, environment=variables) as compiler:
        for op, case in CASES.items():
            told = compiler.ask({"launches": [{"op": op, "cases": [case], "kernels": RUNGS[op]}]}, 300.0)
            assert told["kernels"] > 0
    before = code()
    assert before
    with Child("guarded_launches", environment=variables) as launcher:
        launched = sum(launcher.ask([op, case, RUNGS[op]], 300.0) for op, case in CASES.items())
    assert launched > 2 and code() == before


def test_every_entry_that_checks_or_times_an_op_says_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Compilers:
        def ask_all(self, requests: list[dict[str, Any]]) -> list[Any]:
            asked.extend(requests)
            return [{"kernels": 1, "seconds": 0.0} for _ in requests]

        def stop(self) -> None: ...

    monkeypatch.setattr(ahead, "compilers", Compilers)
    assert ahead.compile_entries([]) == [], "a run with nothing left"
    rows = ahead.compile_entries(make_plan())
    about = {f"{what}:{op}" for what in ("check", "bench") for op in registry.ops()}
    assert {row["entry"] for row in rows} == {request["entry"] for request in asked} == {"ceilings", *about}
    for (launches,) in (request["launches"] for request in asked[1:]):
        every, spec = ahead.launched(launches), registry.get_op(launches["op"])
        own = {kernel.name for kernel in registry.kernels(spec.name).values() if ahead.has_code(kernel)}
        assert {kernel.name for kernel, _, _ in every} == own
        assert not own or len({s.name for *_, s in every}) == (len(spec.schemes) if launches.get("scheme") else 1)
