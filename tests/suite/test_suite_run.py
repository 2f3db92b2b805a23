"""The suite's loop over commands that hang, fail and lie: each has its process, a fault costs one entry or one kernel,
and a killed run continues where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_child_processes import assert_gone

from rooflab.bench.suite import runner, state
from rooflab.bench.suite.entries import Entry
from rooflab.bench.suite.runner import SuiteSettings, run_suite
from rooflab.bench.suite.step import step_words

STEP = str(Path(__file__).with_name("suite_step.py"))
ILLEGAL = "it broke the CUDA context"


@pytest.fixture(autouse=True)
def light_processes(monkeypatch):
    """Processes that import no torch, and ask this file's step whether the device answers."""
    monkeypatch.setattr(runner, "WORKER_IMPORTS", ())
    monkeypatch.setattr(runner, "PROBE_COMMAND", (STEP, "environment", "--probe"))


def entry(name, how="fine", cost_s=5.0, needs=(), **options):
    words = step_words((STEP, how))
    return Entry(name, name, words, cost_s, dry=(*words, "--dry-run"), needs=needs, **options)


MACHINE = entry("environment", "environment")


def run(plan, out, budget_s=120.0, **options):
    notes, steps = [], []
    settings = SuiteSettings(out, budget_s, **options)
    return run_suite(plan, settings, notes.append, steps.append), notes


def lines(out):
    return [line.split() for line in (out / "ran.txt").read_text().splitlines()]


@pytest.mark.more
def test_a_fault_costs_one_entry_and_processes_are_fresh(tmp_path):
    """As on a GPU: the process that dies, or is ended at its limit, takes nobody with it."""
    plan = [
        MACHINE,
        entry("a"),
        entry("dies", "dies"),
        entry("blocked", needs=("dies",)),
        entry("hangs", "slow", -9.4),
        entry("raises", "raises"),
        entry("refuses", "refuses"),
        entry("b"),
    ]
    progress, _ = run(plan, tmp_path)
    found = {name: (outcome.status, outcome.reason) for name, outcome in progress.outcomes.items()}
    for name, status, reason in (
        ("a", "DONE", ""),
        ("dies", "FAILED", "SIGABRT: last words"),
        ("blocked", "BLOCKED", "needs dies, which is FAILED"),
        ("hangs", "FAILED", "TIMEOUT: it had not answered after 2 s"),
        ("raises", "FAILED", "LookupError: no such thing"),
        ("refuses", "FAILED", "rooflab: x: expected a number"),
        ("b", "DONE", ""),
    ):
        assert found[name][0] == status and reason in found[name][1]
    for pid in json.loads((tmp_path / "slow.json").read_text()).values():
        assert_gone(pid)
    assert len({pid for name, pid in lines(tmp_path) if name in ("a", "b")}) == 2, "an entry's process ends with it"
    asked = [name for name, _ in lines(tmp_path)].count("environment")
    assert asked == 4, "once at the start, and after each that was ended or died"
    assert progress.outcomes["a"].figures["infinite"] == "inf" and progress.outcomes["a"].seconds > 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["counts"] == {"DONE": 3, "FAILED": 4, "BLOCKED": 1} and summary["commit"] == "abc"


@pytest.mark.parametrize(("how", "why"), [("dies", "SIGABRT"), ("breaks", ILLEGAL), ("hangs", "TIMEOUT: it had not")])
def test_the_kernel_that_broke_its_process_is_excluded_and_the_rest_is_done(tmp_path, monkeypatch, how, why):
    monkeypatch.setattr(runner, "MAX_KERNEL_S", 1.0)
    progress, notes = run([MACHINE, entry("check:op", f"kernel {how}"), entry("sees", "sees")], tmp_path)
    found = progress.outcomes["check:op"]
    assert found.status == "DONE" and found.figures["ran"] == ["op/a", "op/c"], "what was recorded is kept"
    assert list(found.excluded) == ["op/b"]
    assert why in found.excluded["op/b"] and "while op/b ran" in found.excluded["op/b"]
    assert progress.outcomes["sees"].figures["excluded"] == found.excluded
    assert any("goes on without op/b" in note for note in notes)


def test_a_kernel_that_ran_when_its_entry_was_too_long_is_innocent_and_the_entry_is_begun_again(tmp_path):
    plan = [MACHINE, entry("check:op", "kernel hangs", -9.4), entry("b")]
    found = run(plan, tmp_path)[0].outcomes["check:op"]
    assert found.status == "FAILED" and not found.excluded and "TIMEOUT" in found.reason and "op/b ran" in found.reason
    (tmp_path / "check-op" / "run.txt").write_text("op/a\nop/b\n")  # as if a faster machine had recorded it
    progress, _ = run(plan, tmp_path, resume=True)
    assert progress.outcomes["check:op"].figures["ran"] == ["op/a", "op/b", "op/c"], "what was recorded is kept"
    assert [name for name, _ in lines(tmp_path)].count("b") == 1, "and what was done is not done again"


def test_of_several_suspects_none_is_excluded_and_a_dead_entry_blames_nobody_of_another(tmp_path):
    (tmp_path / "running.json").write_text('{"kernels": ["op/b"], "began": 1.0}')
    progress, _ = run([MACHINE, entry("dies", "dies"), entry("bench:op", "two die")], tmp_path)
    assert progress.outcomes["dies"].status == "FAILED" and not progress.outcomes["dies"].excluded
    found = progress.outcomes["bench:op"]
    assert found.status == "FAILED" and not found.excluded and "while op/b and op/other ran" in found.reason


def test_records_speak_louder_than_a_status_and_what_they_call_wrong_is_not_run_again(tmp_path):
    progress, _ = run([MACHINE, entry("bench:op", "lies"), entry("first", "first"), entry("sees", "sees")], tmp_path)
    found = progress.outcomes["bench:op"]
    assert found.status == "DONE" and found.figures["records"] == {"INCORRECT": 1, "INVALID": 1}
    assert found.excluded == {"op/b": "op/b M=1 bf16: INCORRECT: c: off"} and found.figures["invalid"] == 1
    searched = run([MACHINE, entry("tune:op", "lies", searches=True)], tmp_path / "2")[0].outcomes["tune:op"]
    assert not searched.excluded and searched.figures["records"] == found.figures["records"], "configs, not kernels"
    told_to = progress.outcomes["sees"].figures["excluded"]
    assert set(told_to) == {"op/b", "gemm/naive"} == set(state.read_summary(tmp_path)["excluded"])


def test_a_device_that_no_longer_answers_ends_the_run(tmp_path):
    progress, notes = run([MACHINE, entry("wedges", "wedges"), entry("never")], tmp_path)
    assert progress.stopped == "the device no longer answers: no answer" and progress.stopped in notes
    assert progress.outcomes["never"].status == "NOT_REACHED"
    assert [name for name, _ in lines(tmp_path)] == ["environment"]


def test_an_entry_cut_for_time_is_gone_on_with_and_blocks_nobody(tmp_path):
    plan = [MACHINE, entry("cut", "cut", 60.0), entry("after", needs=("cut",))]
    assert run(plan, tmp_path)[0].outcomes["after"].status == "DONE"
    progress, _ = run(plan, tmp_path, budget_s=20.0, resume=True)
    assert progress.outcomes["cut"].status == "PARTIAL" and progress.outcomes["cut"].figures["parts"] == 1
    progress, notes = run(plan, tmp_path, resume=True)
    assert notes == ["going on: 2 of 3 done"] and progress.outcomes["cut"].figures["parts"] == 2
    assert run(plan, tmp_path, resume=True)[0].outcomes["cut"].status == "DONE"


def test_the_budget_ends_the_run_and_says_what_it_did_not_reach(tmp_path):
    clock = iter([0.0, *[100.0] * 3, *[290.0] * 100])
    plan = [entry("a", cost_s=60), entry("dear", cost_s=60), entry("cheap", cost_s=20)]
    progress = run_suite(plan, SuiteSettings(tmp_path, 300.0), print, print, clock=lambda: next(clock))
    found = {name: outcome.status for name, outcome in progress.outcomes.items()}
    assert found == {"a": "DONE", "dear": "NOT_REACHED", "cheap": "DONE"}
    assert progress.outcomes["dear"].reason == "10 s of the budget were left, and it takes 60"
    assert progress.outcomes["cheap"].figures["seconds"] == 10.0, "it is told to do with what is left"
    told_whole = run([entry("whole", whole=True)], tmp_path / "2", 1000.0)[0].outcomes["whole"].figures
    assert told_whole["seconds"] == 45.0, "3 times its cost of 5 and 30 more"


def test_what_runs_beside_waits_for_nobody_and_ends_with_the_run(tmp_path):
    plan = [MACHINE, entry("ahead", "slow", beside=True), entry("b", "waits", 60.0)]
    progress, _ = run(plan, tmp_path)
    assert [one.status for one in progress.outcomes.values()] == ["DONE"] * 3
    for pid in json.loads((tmp_path / "slow.json").read_text()).values():
        assert_gone(pid)


@pytest.mark.more
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """SIGKILL under an entry: its process and its child go too, and the next run does the rest and no more."""
    plan = [MACHINE, entry("a"), entry("slow", "slow", 200.0), entry("b")]
    code = f"""
import sys; sys.path[:] = {sys.path!r}
from pathlib import Path
import test_suite_run as t
from rooflab.bench.suite import runner
runner.WORKER_IMPORTS = ()
t.run([t.MACHINE, t.entry("a"), t.entry("slow", "slow", 200.0), t.entry("b")], Path({str(tmp_path)!r}), budget_s=900)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (tmp_path / "slow.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    time.sleep(0.2)
    process.kill()
    process.wait()
    for pid in json.loads((tmp_path / "slow.json").read_text()).values():
        assert_gone(pid)
    statuses = {row["entry"]: row["status"] for row in state.read_summary(tmp_path)["entries"]}
    assert statuses == {"environment": "DONE", "a": "DONE", "slow": "RUNNING"}
    with pytest.raises(ValueError, match="holds a suite run; add --resume"):
        run(plan, tmp_path)
    monkeypatch.setenv("TEST_FAST", "1")
    progress, notes = run(plan, tmp_path, resume=True)
    assert notes == ["going on: 2 of 4 done"] and {one.status for one in progress.outcomes.values()} == {"DONE"}
    assert [name for name, _ in lines(tmp_path)] == ["environment", "a", "slow", "environment", "slow", "b"]


def test_another_card_of_the_kind_goes_on_from_a_copy_and_another_kind_is_refused(tmp_path, monkeypatch):
    plan = [MACHINE, entry("a"), entry("ceilings", of_card=True), entry("b", needs=("a",))]
    first, second = tmp_path / "first", tmp_path / "second"
    run(plan, first)
    shutil.copytree(first, second)
    monkeypatch.setenv("TEST_UUID", "GPU-2")
    for _ in range(2):  # on the same card nothing is done again
        run(plan, second, resume=True)
        assert [name for name, _ in lines(second)][4:].count("ceilings") == 1
        assert {name for name, _ in lines(second)[4:]} == {"environment", "ceilings"}
    monkeypatch.setenv("TEST_KEY", "h200-16c")
    with pytest.raises(ValueError, match="out: expected a run of this machine, but the machine was h100-16c and is h2"):
        run(plan, second, resume=True)
    assert state.environment_in(second)["machine_key"] == "h100-16c"


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="budget: expected seconds above 0, got 0"):
        run([entry("a")], tmp_path, budget_s=0)
    state.folder_of(tmp_path, "a").mkdir()
    (tmp_path / "a" / state.RESULT_FILE).write_text('{"version": 1}')
    with pytest.raises(ValueError, match="expected the result of an entry"):
        run([entry("a")], tmp_path, resume=True)
    assert os.listdir(tmp_path) == ["a"]
