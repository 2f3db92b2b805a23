"""The whole plan on a card that is not there: entries take the time that the plan says, on a clock of the test's own.

What an entry does is tested elsewhere; here is what the runner makes of the time, of faults and of several machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rooflab.bench.processes.child import Died, TimedOut
from rooflab.bench.suite import runner, running, state
from rooflab.bench.suite.entries import Entry, Outcome
from rooflab.bench.suite.plan import make_plan
from rooflab.bench.suite.runner import Settings, run_suite
from rooflab.bench.suite.running import Running

PLAN = make_plan()
BARS = {entry.id for entry in PLAN if entry.id.startswith("bar:")} - {"bar:ab.false_alarms"}
"""All but the one that takes longer than all others."""
BUDGET_S = 570.0


class Card:
    """A machine with a GPU, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: float = 1.0, **faults: str):
        self.slower, self.faults = slower, {name.replace("__", "/"): how for name, how in faults.items()}
        self.now = 1e9
        self.ran: list[str] = []
        self.ahead: list[str] = []
        self.kernels = {entry.id: [f"{op}/own" for op in entry.ops] for entry in PLAN}
        monkeypatch.setattr(runner, "Child", lambda *command, **options: self)
        for module in (runner, running):
            monkeypatch.setattr(f"{module.__name__}.time.time", lambda: self.now)

    def run(self, out: Path, **options: Any) -> state.Progress:
        """A run of the plan in ten minutes."""
        settings = Settings(out, BUDGET_S, **options)
        return run_suite(PLAN, settings, lambda note: None, lambda step: None, clock=lambda: self.now)

    def stop(self) -> None:
        """Ends the process, at once."""

    def post(self, request: Mapping[str, Any]) -> None:
        """The process that compiles ahead is asked once, and not waited for."""
        assert not self.ahead
        self.ahead = request["entries"]

    def ask(self, request: Mapping[str, Any], limit_s: float, hangs: Callable[[], bool]) -> Any:
        """The answer of an entry's process."""
        context = request["context"]
        name, out = context["entry"], Path(context["out"])
        if name in ("identify", "probe"):
            environment = {"machine_key": "h100", "commit": "abc", "gpu": {"name": "NVIDIA H100 80GB HBM3"}}
            return asdict(Outcome(figures={"environment": environment, "ceilings": "ceilings" in self.ran}))
        self.ran.append(name)
        entry: Entry = next(one for one in PLAN if one.id == name)
        for kernel in self.kernels[name] if name != "first" else ():
            if kernel in context["excluded"]:
                continue
            Running(name, files=()).note(out, [kernel])
            if self.faults.get(kernel) == "faults":
                self.now += 5.0
                raise Died(-6, "an illegal access")
            if self.faults.get(kernel) == "hangs":
                ends = self.now + limit_s
                while self.now < ends and not hangs():
                    self.now += 1.0
                raise TimedOut(limit_s)
        seconds = self.slower * entry.cost_s
        if seconds > limit_s:
            if self.kernels[name]:
                self.now += limit_s - 5.0
                Running(name, files=()).note(out, self.kernels[name][-1:])  # one of many, begun just before
                self.now += 5.0
            raise TimedOut(limit_s)
        cut = seconds > context["seconds"] and not entry.whole
        self.now += min(seconds, max(context["seconds"], 0.0)) if cut else seconds
        bar = "MET" if name.startswith("bar:") and not cut else None
        return asdict(Outcome("PARTIAL" if cut else "DONE", bar=bar))


def answered(progress: state.Progress) -> set[str]:
    return {name for name in BARS if name in progress.outcomes and progress.outcomes[name].bar is not None}


def test_three_times_ten_minutes_on_three_machines_answer_every_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[str] = set()
    for number in range(3):
        out, archive = tmp_path / str(number), tmp_path / "run.tar.gz"
        if number:
            state.unpack(archive, out)
        card = Card(monkeypatch)
        progress = card.run(out, resume=bool(number))
        assert not done & set(card.ran) - {"ceilings"} and "ceilings" in card.ran, "each card has its own"
        assert set(card.ran) <= set(card.ahead) == {entry.id for entry in PLAN} - done | {"ceilings"}
        done |= {name for name, outcome in progress.outcomes.items() if outcome.status == "DONE"}
        assert len(answered(progress)) >= 8
        state.pack(out, archive)
    assert answered(progress) == BARS, BARS - answered(progress)


@pytest.mark.parametrize("how", ["hangs", "faults"])
def test_a_wrong_kernel_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    card = Card(monkeypatch, gemm__own=how)
    progress = card.run(tmp_path)
    assert set(progress.excluded()) == {"gemm/own"} and len(answered(progress)) >= 6
    found = json.loads((tmp_path / "progress.json").read_text())
    assert found["outcomes"]["bar:gemm.bf16_large"]["status"] == "DONE", "its other kernels are judged"


def test_a_card_that_is_slower_than_the_plan_says_excludes_nobody_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, slower=4.0)
    progress = card.run(tmp_path)
    assert not progress.excluded()
    slow = {name for name, outcome in progress.outcomes.items() if outcome.reason.startswith("TIMEOUT")}
    quick = Card(monkeypatch)
    progress = quick.run(tmp_path, resume=True)
    assert "first" in slow & set(quick.ran)
    assert not progress.excluded() and len(answered(progress)) >= 8
