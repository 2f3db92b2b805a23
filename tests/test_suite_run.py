"""The suite's loop: one process an entry, a fault costs one entry, and a killed run goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rooflab.bench.suite import runner, state
from rooflab.bench.suite.entries import Entry, Outcome
from rooflab.bench.suite.runner import Settings, run_suite

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def light_processes(monkeypatch):
    """Processes that find the tests' entries and import no torch."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(runner, "IMPORTS", ())
    monkeypatch.setattr(runner, "IDENTIFY", "suite_entries:identify")
    monkeypatch.setattr(runner, "PROBE", "suite_entries:fine")


def entry(name, call="fine", cost_s=5.0, needs=(), **arguments):
    return Entry(name, name, f"suite_entries:{call}", arguments, cost_s, needs=needs)


def run(plan, out, budget_s=120.0, **options):
    notes, steps = [], []
    settings = Settings(out, budget_s, **options)
    return run_suite(plan, settings, notes.append, steps.append), notes


def lines(out):
    return [line.split() for line in (out / "ran.txt").read_text().splitlines()]


@pytest.mark.more
def test_a_fault_costs_one_entry_and_processes_are_fresh(tmp_path):
    """As on a GPU: the process that dies, or is ended at its limit, takes nobody with it."""
    plan = [
        entry("a"), entry("dies", "dies"), entry("blocked", needs=("dies",)),
        Entry("hangs", "", "suite_entries:slow", {"seconds": 600}, cost_s=-9.4), entry("raises", "raises"), entry("b"),
    ]  # fmt: skip
    progress, notes = run(plan, tmp_path)
    outcomes = progress.outcomes
    assert [outcomes[one.id].status for one in plan] == ["DONE", "FAILED", "BLOCKED", "FAILED", "FAILED", "DONE"]
    assert "SIGABRT" in outcomes["dies"].reason and "last words" in (tmp_path / "suite.log").read_text()
    assert outcomes["blocked"].reason == "needs dies, which is FAILED"
    assert outcomes["hangs"].reason.startswith("TIMEOUT: it had not answered after 2 s")
    assert "ValueError: x: expected a number" in outcomes["raises"].reason
    left = json.loads((tmp_path / "slow.json").read_text())
    assert not any(psutil.pid_exists(left[name]) and psutil.Process(left[name]).status() != "zombie" for name in left)
    pids = [pid for name, pid in lines(tmp_path) if name in ("a", "b")]
    assert len(set(pids)) == 2, "an entry's process ends with it"
    assert [name for name, _ in lines(tmp_path)].count("probe") == 2, "asked after each that was ended"
    assert outcomes["a"].figures["infinite"] == "inf" and outcomes["a"].seconds > 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["counts"] == {"DONE": 2, "FAILED": 3, "BLOCKED": 1}
    assert "| dies | FAILED |" in (tmp_path / "summary.md").read_text()


def test_a_device_that_no_longer_answers_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PROBE", "suite_entries:wedged")
    progress, notes = run([entry("dies", "dies"), entry("never")], tmp_path)
    assert progress.stopped == "the device no longer answers: no answer" and progress.stopped in notes
    assert progress.outcomes["never"].status == "NOT_REACHED" and not (tmp_path / "ran.txt").exists()


def test_what_is_excluded_or_verified_is_told_to_later_entries(tmp_path):
    progress, _ = run([entry("first", "first"), entry("sees", "sees")], tmp_path, dry_run=True)
    told = progress.outcomes["sees"].figures
    assert told == {"excluded": {"gemm/naive": "RUNTIME_ERROR: it wrote out of bounds"}, "verified": ["gemm/library"]}
    assert state.read_summary(tmp_path)["excluded"] == told["excluded"]


@pytest.mark.more
def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    """SIGKILL under an entry: its process and its child go too, and the next run does the rest and no more."""
    plan = [entry("a"), entry("slow", "slow", cost_s=200, seconds=600), entry("b")]
    code = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
import test_suite_run as t
from rooflab.bench.suite import runner
runner.IMPORTS, runner.IDENTIFY = (), "suite_entries:identify"
t.run([t.entry("a"), t.entry("slow", "slow", cost_s=200, seconds=600), t.entry("b")], Path({str(tmp_path)!r}),
      budget_s=900, dry_run=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (tmp_path / "slow.json").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = json.loads((tmp_path / "slow.json").read_text())
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in left.values()):
        assert time.monotonic() < deadline, "what the run had started outlived it"
        time.sleep(0.1)
    statuses = {row["entry"]: row["status"] for row in state.read_summary(tmp_path)["entries"]}
    assert statuses == {"a": "DONE", "slow": "RUNNING"}

    with pytest.raises(ValueError, match="holds a suite run; add --resume"):
        run(plan, tmp_path, dry_run=True)
    shorter = [plan[0], entry("slow", "slow", cost_s=200, seconds=0), plan[2]]
    progress, notes = run(shorter, tmp_path, dry_run=True, resume=True)
    assert notes[0].startswith("starting anew: the plan was") and (tmp_path / "progress-1.json").exists()
    assert [name for name, _ in lines(tmp_path)] == ["a", "a", "b"], "another plan begins at its beginning"
    state.set_aside(tmp_path)
    progress.outcomes.pop("b")
    progress.save(tmp_path)
    again, notes = run(shorter, tmp_path, dry_run=True, resume=True)
    assert notes == ["going on: 2 of 3 done"] and [name for name, _ in lines(tmp_path)] == ["a", "a", "b", "b"]
    assert {one.status for one in again.outcomes.values()} == {"DONE"}


def test_the_budget_ends_the_run_and_says_what_it_did_not_reach(tmp_path):
    clock = iter([0.0, *[100.0] * 3, *[290.0] * 100])
    plan = [entry("a", cost_s=60), entry("dear", cost_s=60), entry("cheap", cost_s=20)]
    progress = run_suite(plan, Settings(tmp_path, 300.0), print, print, clock=lambda: next(clock))
    found = {name: outcome.status for name, outcome in progress.outcomes.items()}
    assert found == {"a": "DONE", "dear": "NOT_REACHED", "cheap": "DONE"}
    assert progress.outcomes["dear"].reason == "10 s of the budget were left, and it takes 60"
    assert progress.outcomes["cheap"].figures["seconds"] == 10.0, "it is told to do with what is left"


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="budget: expected seconds above 0, got 0"):
        run([entry("a")], tmp_path, budget_s=0)
    with pytest.raises(ValueError, match="summary: expected a folder with a suite run"):
        state.read_summary(tmp_path)
    (tmp_path / state.FILE).write_text('{"version": 1}')
    with pytest.raises(ValueError, match="expected the state of a suite run"):
        run([entry("a")], tmp_path, resume=True)
    assert os.listdir(tmp_path) == [state.FILE] and isinstance(Outcome(), Outcome)


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_its_archive(tmp_path, ended_by):
    """By SIGKILL what was there some seconds before; by SIGTERM all."""
    code = f"""
import time
from pathlib import Path
from rooflab.bench.processes.child import terminated_as_exception
from rooflab.bench.suite.state import packed
out = Path({str(tmp_path)!r}) / "run"
out.mkdir()
with terminated_as_exception(), packed(out, out.parent / "run.tar.gz", {0.05 if ended_by == signal.SIGKILL else 600}):
    (out / "r.jsonl").write_text("a record")
    print(flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1)
        time.sleep(1.0 if ended_by == signal.SIGKILL else 0.0)
        process.send_signal(ended_by)
    state.unpack(tmp_path / "run.tar.gz", tmp_path / "back")
    assert (tmp_path / "back" / "r.jsonl").read_text() == "a record"


def test_another_card_of_the_kind_goes_on_from_the_archive_and_measures_its_own_ceilings(tmp_path, monkeypatch):
    plan = [entry("a"), entry("ceilings"), entry("b", needs=("a",))]
    first = tmp_path / "first"
    run(plan, first)
    (first / "cache").mkdir()
    (first / "cache" / "file").write_text("compiled")
    archive = state.pack(first, first / "run.tar.gz")
    second = tmp_path / "second"
    state.unpack(archive, second)
    names = {str(path.relative_to(second)) for path in second.rglob("*") if path.is_file()}
    assert {"progress.json", "summary.md", "ran.txt"} <= names
    assert not names & {"cache/file", "run.tar.gz", "run.tar.gz.part"}
    _, notes = run(plan, second, resume=True)
    assert [name for name, _ in lines(second)] == ["a", "ceilings", "b", "ceilings"]
    assert "no ceilings are kept of this card: they are measured" in notes
    monkeypatch.setenv("TEST_CEILINGS", "1")
    run(plan, second, resume=True)
    assert [name for name, _ in lines(second)].count("ceilings") == 2, "where they are kept, nothing is done again"
    (tmp_path / "bad.tar.gz").write_text("no archive")
    with pytest.raises(ValueError, match="archive: expected a .tar.gz of a suite's folder"):
        state.unpack(tmp_path / "bad.tar.gz", second)
