"""`rooflab suite --dry-run`: the whole plan on a CPU, as CI runs it; and the output of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands_in_process import run_command
from targets import judge

from rooflab.bench.core import record_files
from rooflab.bench.core import select as selection
from rooflab.bench.suite import runner, state
from rooflab.bench.suite.entries import EntryOutcome
from rooflab.bench.suite.plan import make_plan

TARGETS = str(Path(judge.__file__).with_name("plan.json"))
SOME = ("bar:rope_and_cache.bandwidth", "check:rmsnorm", "self-test")
"""With what they need: the card, first checks, ceilings, a target, checks, and what a CPU has no form of."""


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("only", [pytest.param((), marks=pytest.mark.slow, id="whole"), pytest.param(SOME, id="some")])
def test_the_plan_runs_on_a_cpu(tmp_path, only):
    out = tmp_path / "run"
    words = [word for name in only for word in ("--only", name)]
    status, found, errors = run_command(("suite", TARGETS, "--dry-run", *words, "--out", str(out), "--json"))
    assert status == 0, errors[-3000:]
    rows = {row["entry"]: row for row in found["entries"]}
    assert list(rows) == [entry.id for entry in make_plan(only, [Path(TARGETS)])]
    # What takes minutes there, and what a CPU cannot answer.
    left_out = ("ahead", "self-test", "bar:ab.", "bar:emulator.golden", "counted", "latency:", "serving:")
    for name, row in rows.items():
        assert row["status"] == "DONE" or (
            row["status"] == "UNSUPPORTED" and row["reason"] and name.startswith(left_out)
        )
    assert found["bars"]["MET"] == found["bars"]["MISSED"] == 0, "a dry run answers no target"
    records = record_files.read_all(out)
    assert {record.kind for record in records} >= ({"check", "bench"} if only else {"check", "bench", "engine"})
    assert {record.device for record in records if record.device} == {"cpu"}
    status, shown, _ = run_command(("suite", "--summary", str(out), "--json"))
    assert status == 0 and shown == found
    status, text, _ = run_command(("suite", "--summary", str(out)))
    assert status == 0 and "cpu, dry run" in text["output"] and "UNMEASURED" in text["output"]
    status, _, errors = run_command(("suite", "--dry-run", "--out", str(out)))
    assert status == 2 and "holds a suite run; add --resume" in " ".join(errors.split())


def test_bad_input_is_one_sentence_and_status_2(tmp_path):
    for words, message in [
        (("suite", "--only", "gem", "--dry-run"), "only: expected an op or an entry"),
        (("suite", "--summary", str(tmp_path)), "summary: expected a folder with a suite run"),
        (("suite", "--only", "gemm"), "suite: torch finds no CUDA device; --dry-run"),
        (("tune", "gemm", "--dry-run", "--choose"), "choose: expected --records with it"),
    ]:
        status, value, errors = run_command(words)
        assert status == 2 and value is None and errors.startswith("rooflab: "), errors
        assert message in " ".join(errors.split()) and "Traceback" not in errors


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (EntryOutcome(), 0),
        (EntryOutcome("PARTIAL", "time for 1 of 2 cases"), 0),
        (EntryOutcome(figures={"invalid": 2}), 13),
        (EntryOutcome(figures={"invalid": 2}, excluded={"gemm/wrong": "INCORRECT"}), 11),
        (EntryOutcome("FAILED"), 11),
    ],
)
def test_the_suite_ends_with_what_it_found(tmp_path, monkeypatch, outcome, status):
    def run_suite(plan, settings, note, advance):
        settings.out.mkdir(exist_ok=True)
        state.write_summary(settings.out, state.Progress({"bench:gemm": outcome}), {}, {})

    monkeypatch.setattr(runner, "run_suite", run_suite)
    monkeypatch.setattr(selection, "pick_device", lambda name: torch.device("cuda"))
    assert run_command(("suite", "--only", "gemm", "--out", str(tmp_path), "--json"))[0] == status
