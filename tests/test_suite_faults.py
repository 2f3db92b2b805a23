"""A kernel that breaks its process costs the suite that kernel alone; what was cut for time is gone on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import test_suite_run as runs
from commands_in_process import run_command
from test_suite_bars import CASES, record
from test_suite_run import entry, light_processes, run  # noqa: F401

from rooflab.bench.check.check import BROKEN
from rooflab.bench.processes.child import Child, Stuck
from rooflab.bench.records import files as record_files
from rooflab.bench.suite import measures, runner, state, tasks
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.plan import make_plan
from rooflab.bench.suite.running import ContextBroken, Running, read_running
from rooflab.kernels import registry
from rooflab.reference.spec import Case

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("how", "why"), [("dies", "SIGABRT"), ("breaks", ILLEGAL), ("hangs", "TIMEOUT: it had not answered after ")]
)
def test_the_kernel_that_broke_its_process_is_excluded_and_the_rest_is_done(tmp_path, monkeypatch, how, why):
    monkeypatch.setattr(runner, "HUNG_S", 1.0)
    plan = [entry("check:op", "kernels", cost_s=-9.4, how=how), entry("sees", "sees")]
    progress, notes = run(plan, tmp_path)
    found = progress.outcomes["check:op"]
    assert found.status == "DONE" and found.figures["ran"] == ["op/a", "op/c"], "what was recorded is kept"
    assert list(found.excluded) == ["op/b"]
    assert why in found.excluded["op/b"] and "while op/b ran" in found.excluded["op/b"]
    assert found.files == ("run.jsonl",) and not found.again
    assert progress.outcomes["sees"].figures["excluded"] == found.excluded
    assert any("goes on without op/b" in note for note in notes)


def test_a_kernel_that_ran_when_its_entry_was_too_long_is_innocent_and_the_entry_is_begun_again(tmp_path):
    plan = [entry("check:op", "kernels", cost_s=-9.4, how="hangs"), entry("b")]
    progress, _ = run(plan, tmp_path)
    found = progress.outcomes["check:op"]
    assert found.status == "FAILED" and not found.excluded and "TIMEOUT" in found.reason and "op/b ran" in found.reason
    (tmp_path / "run.jsonl").write_text("op/a\nop/b\n")  # as if a faster machine had recorded it
    progress, _ = run(plan, tmp_path, resume=True)
    assert progress.outcomes["check:op"].figures["ran"] == ["op/a", "op/b", "op/c"], "what was recorded is kept"
    assert [name for name, _ in runs.lines(tmp_path)].count("b") == 1, "and what was done is not done again"


def test_of_several_suspects_none_is_excluded(tmp_path):
    progress, _ = run([entry("bench:op", "kernels", how="dies", suspects=2)], tmp_path)
    found = progress.outcomes["bench:op"]
    assert found.status == "FAILED" and not found.excluded and "while op/b and op/other ran" in found.reason
    assert found.files == ("run.jsonl",)


def test_what_was_noted_for_another_entry_is_laid_on_nobody(tmp_path):
    Running("other").note(tmp_path, ["op/b"])
    progress, _ = run([entry("dies", "dies")], tmp_path)
    assert progress.outcomes["dies"].status == "FAILED" and not progress.outcomes["dies"].excluded


def test_an_entry_cut_for_time_is_gone_on_with_and_blocks_nobody(tmp_path):
    plan = [entry("cut", "cut"), entry("after", needs=("cut",))]
    progress, _ = run(plan, tmp_path, dry_run=True)
    assert progress.outcomes["cut"].status == "PARTIAL" and progress.outcomes["after"].status == "DONE"
    progress, notes = run(plan, tmp_path, dry_run=True, resume=True)
    assert notes == ["going on: 1 of 2 done"] and progress.outcomes["cut"].figures["parts"] == 2
    done, _ = run(plan, tmp_path, dry_run=True, resume=True)
    assert done.outcomes["cut"].status == "DONE" and done.outcomes["cut"].figures["parts"] == 3


def test_without_time_a_part_that_was_done_stays(tmp_path):
    plan = [entry("cut", "cut", cost_s=60.0)]
    progress, _ = run(plan, tmp_path)
    assert progress.outcomes["cut"].status == "PARTIAL"
    progress, _ = run(plan, tmp_path, budget_s=5.0, resume=True)
    assert progress.outcomes["cut"].status == "PARTIAL" and progress.outcomes["cut"].files == ("run.jsonl",)


def test_the_first_checks_may_take_more_than_their_cost(tmp_path):
    first = next(one for one in make_plan() if one.id == "first")
    assert first.most_s > 2 * first.cost_s and first.limit_s >= first.most_s + tasks.FIRST_CHECK_S
    other = replace(first, whole=False)
    assert other.most_s == other.cost_s < other.limit_s
    told = run([replace(entry("first"), whole=True)], tmp_path, budget_s=1000.0)[0].outcomes["first"].figures
    assert told["seconds"] == 45.0, "3 times its cost of 5 and 30 more"


def test_a_process_that_does_not_end_keeps_its_answer_and_the_device_is_asked(tmp_path, monkeypatch):
    stop = Child.stop

    def hangs(self):
        stop(self)
        monkeypatch.setattr(Child, "stop", stop)
        raise Stuck

    monkeypatch.setattr(Child, "stop", hangs)
    progress, notes = run([entry("a"), entry("b")], tmp_path)
    assert [one.status for one in progress.outcomes.values()] == ["DONE", "DONE"]
    assert "a: TIMEOUT: its process does not end, and holds the device" in notes
    assert [name for name, _ in runs.lines(tmp_path)] == ["a", "probe", "b"]


def on_cpu(folder: Path, **changes) -> Context:
    return replace(Context("check:rmsnorm", folder, "cpu", True, 60.0), **changes)


def test_a_check_ends_at_a_broken_context_and_goes_on_without_its_kernel(tmp_path, monkeypatch):
    answers = iter([ILLEGAL])
    monkeypatch.setattr(tasks, "already_broken", lambda device: next(answers, ""))
    with pytest.raises(ContextBroken, match="illegal memory access"):
        tasks.check(on_cpu(tmp_path), "rmsnorm")
    at = read_running(tmp_path, "check:rmsnorm")
    before = record_files.read(tmp_path / at.files[0])
    assert at.kernels == (f"rmsnorm/{before[-1].kernel}",) and len(before) == 1
    context = on_cpu(tmp_path, earlier=at.files, excluded=dict.fromkeys(at.kernels, "it broke the context"))
    found = tasks.check(context, "rmsnorm")
    after = record_files.read(tmp_path / at.files[0])
    assert found.status == "DONE" and found.files == at.files and not list(tmp_path.glob("running*"))
    assert after[:1] == before and len({(one.kernel, one.case_id, one.scheme) for one in after}) == len(after) > 1


def measured(monkeypatch, *records):
    """`measure` of two kernels of gemm on two cases, where `measure_op` gives these records."""
    asked = []

    def measure_op(spec, kernels, cases, *args, run_id, running, **options):
        asked.append(([kernel.name for kernel in kernels], [case.id for case in cases]))
        for one in records:
            running([f"gemm/{one.kernel}"])
            yield replace(one, run_id=run_id)

    monkeypatch.setattr(measures, "measure_op", measure_op)
    return asked


def test_measuring_goes_on_with_the_cases_that_are_left_and_says_nothing_of_the_innocent(tmp_path, monkeypatch):
    kernels = [registry.get_kernel("gemm", name) for name in ("naive", "library")]
    cases = [registry.get_op("gemm").check_case(Case.parse(text)) for text in CASES]
    fault = {"status": "RUNTIME_ERROR", "basis": "bound"}
    measured(
        monkeypatch,
        *(record(name, CASES[0], 1.0) for name in ("naive", "library")),
        record("library", CASES[1], None, reason=f"{BROKEN}, by gemm/naive: {ILLEGAL}", **fault),
        record("naive", CASES[1], None, reason=ILLEGAL, **fault),
    )
    monkeypatch.setattr(measures, "already_broken", lambda device: ILLEGAL)
    context = Context("bench:gemm", tmp_path, "cpu", False, 60.0)
    with pytest.raises(ContextBroken, match="illegal"):
        measures.measure(context, "gemm", kernels, cases)
    at = read_running(tmp_path, "bench:gemm")
    written = record_files.read(tmp_path / at.files[0])
    assert [(one.kernel, one.status) for one in written[2:]] == [("naive", "RUNTIME_ERROR")]
    monkeypatch.setattr(measures, "already_broken", lambda device: "")
    asked = measured(monkeypatch, record("library", CASES[1], 1.0))
    found, run_id, cut = measures.measure(replace(context, earlier=at.files), "gemm", kernels[1:], cases)
    assert asked == [(["library"], [CASES[1]])] and not cut and at.files == (f"{run_id}.jsonl",)
    assert [one.case_id for one in found if one.kernel == "library"] == CASES


def test_a_bar_that_was_cut_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "measure", lambda *args: ([record("good", CASES[0], 1.0)], "r", True))
    found = measures.against_library(Context("bar:x", tmp_path, "cuda", False, 9.0), "gemm", CASES, 1.0)
    assert (found.status, found.bar, found.files) == ("PARTIAL", "UNMEASURED", ("r.jsonl",))


def test_what_is_wrong_at_a_models_shapes_is_said_and_excluded(tmp_path, monkeypatch):
    fault = {"basis": "bound", "role": "optimized"}
    records = [
        record("library", CASES[0], 1.0),
        record("wrong", CASES[0], None, status="INCORRECT", reason="c: 3 elements off", **fault),
        record("quick", CASES[0], 0.1, status="INVALID", reason="9 times the memory ceiling"),
        record("large", CASES[0], None, status="OUT_OF_MEMORY", reason="needs 900 GB", **fault),
    ]
    monkeypatch.setattr(tasks, "measure", lambda *args: (records, "r", False))
    found = tasks.bench(Context("bench:gemm", tmp_path, "cuda", False, 9.0), "gemm", ["smoke"])
    assert list(found.excluded) == ["gemm/wrong"] and "INCORRECT: c: 3 elements off" in found.reason
    assert "INVALID: 9 times" in found.reason and "OUT_OF_MEMORY" in found.reason and found.figures["invalid"] == 1
    assert found.status == "DONE"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome(), 0),
        (Outcome("PARTIAL", "time for 1 of 2 cases"), 0),
        (Outcome(figures={"invalid": 2}), 13),
        (Outcome(figures={"invalid": 2}, excluded={"gemm/wrong": "INCORRECT"}), 11),
        (Outcome("NOT_REACHED"), 13),
    ],
)
def test_the_suite_ends_with_what_it_found(tmp_path, monkeypatch, outcome, status):
    def run_suite(plan, settings, note, advance):
        identity = state.Identity("p", None, "t", "m")
        state.Progress(identity, {}, outcomes={"bench:gemm": outcome}).save(settings.out)

    monkeypatch.setattr(runner, "run_suite", run_suite)
    assert run_command(("suite", "--dry-run", "--only", "gemm", "--out", str(tmp_path), "--json"))[0] == status
