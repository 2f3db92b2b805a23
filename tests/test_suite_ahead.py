"""What later entries launch is compiled ahead, and their launches find it in the compilers' caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rooflab.bench.processes.child import Child, command_for
from rooflab.bench.suite import ahead, measures, tasks
from rooflab.bench.suite.bars import AGAINST_LIBRARY, bar
from rooflab.bench.suite.plan import make_plan

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
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= folders | {"PYTHONPATH": str(TESTS)}

    def code() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if path.suffix in (".cubin", ".ttir")}

    with Child(command_for(ahead.ITSELF), variables) as compiler:
        for op, case in CASES.items():
            entry = bar(f"{op}.x", "", AGAINST_LIBRARY, cost_s=1, value=1, cases=[case], geomean=1, rungs=RUNGS[op])
            told = compiler.ask({"entry": entry.id, "call": entry.call, "arguments": entry.arguments}, 300.0)
            assert told["kernels"] > 0
    before = code()
    assert before
    with Child(command_for("guarded_launches"), variables) as launcher:
        launched = sum(launcher.ask([op, case, RUNGS[op]], 300.0) for op, case in CASES.items())
    assert launched > 2 and code() == before


def test_every_entry_about_an_op_says_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the sums of fp8 products, which launch what the bar of their speed launches."""
    rehearsed: list[Any] = []

    class Compilers:
        def ask_all(self, requests: list[dict[str, Any]]) -> list[Any]:
            return [ahead.answer(request) | {"launched": rehearsed[-1]} for request in requests]

        def stop(self) -> None: ...

    for module in (measures, tasks):
        monkeypatch.setattr(module, "rehearse", lambda *told: rehearsed.append(told))
    monkeypatch.setattr(ahead, "compilers", Compilers)
    monkeypatch.setattr(ahead.os, "setpriority", lambda *given: None)
    assert ahead.compile_entries([]) == [], "a run with nothing left"
    rows = ahead.compile_entries()
    about = {e.id for e in make_plan() if "op" in e.arguments and e.id.partition(":")[0] != "tune"}
    assert {row["entry"] for row in rows} == about
    assert len(rehearsed) >= len(about) - 1
    assert all(kernels and cases and schemes for kernels, cases, schemes in rehearsed)
