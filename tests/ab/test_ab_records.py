"""Two record files as the sides of an A/B: missing, wrong, foreign or unreadable records never pass."""

import math
from dataclasses import replace

import pytest
from test_targets import record

from rooflab.bench.ab.evidence import compare_files, only_in
from rooflab.bench.ab.verdict import Rules, exit_status
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import write
from rooflab.bench.exchange.files import environment

RULES = Rules()
GPU = {"name": "NVIDIA H200", "driver": "580.1"}
ENVIRONMENT = {"machine_key": "unit-test-machine", "cpu": "none", "cores": 2, "threads": 2, "gpu": GPU}


def reading(minute, seconds, **values):
    timestamp, samples = f"2026-01-01T00:{minute:02}:00+00:00", Record.packed([seconds] * 3)
    made = record("tiled", "M=64", seconds * 1e3, run_id=f"run-{minute}", environment=ENVIRONMENT, samples=samples)
    return replace(made, **{"timestamp": timestamp, "timer": "cuda events, launch gaps hidden"} | values)


def side(tmp_path, name, records):
    path = tmp_path / f"{name}.jsonl"
    write(path, *records)
    return path


def series(first_minute, step, seconds, count=12, **values):
    return [
        reading(first_minute + step * index, seconds * (1 + 0.001 * (-1) ** index), **values) for index in range(count)
    ]


def verdicts(tmp_path, a, b, **how):
    outcomes = compare_files(side(tmp_path, "a", a), side(tmp_path, "b", b), RULES, **how)
    return outcomes, exit_status(outcomes, strict=True)


@pytest.mark.parametrize(("slower", "verdict", "status"), ((1.1, "SLOWER", 10), (1.0, "SAME", 0), (0.9, "FASTER", 0)))
def test_runs_made_in_turn_are_judged(tmp_path, slower, verdict, status):
    timers = "cpu, threads pinned, 4 calls per sample", "cpu, threads not pinned: 1 of 2, 5 calls per sample"
    a, b = series(0, 2, 1e-3, timer=timers[0]), series(1, 2, slower * 1e-3, timer=timers[1])
    found, ended = verdicts(tmp_path, a, b)
    assert (found[0].verdict, ended) == (verdict, status), found[0].reason


@pytest.mark.parametrize(
    ("slower", "day", "called"), [(1.0, 1, ""), (1.02, 1, ""), (1.1, 1, "SLOWER"), (0.9, 1, "FASTER"), (1.1, 9, "")]
)
def test_runs_made_one_side_after_the_other_are_called_only_far_beyond_all_drift(tmp_path, slower, day, called):
    """Within a side 0.2% are seen in 11 minutes, so 0.27% may have come in 20 minutes, and 7% in eight days."""
    later = series(20, 1, slower * 1e-3)
    later = [replace(one, timestamp=one.timestamp.replace("01-01T", f"01-{day:02}T")) for one in later]
    found, status = verdicts(tmp_path, series(0, 1, 1e-3), later)
    assert found[0].verdict == (called or "UNRESOLVED") and status == {"SLOWER": 10, "FASTER": 0, "": 12}[called]
    assert called or "not measured in turn" in found[0].reason
    assert found[0].effect == pytest.approx(slower - 1, abs=0.01)


@pytest.mark.parametrize(
    ("first", "second", "count", "verdict", "why"),
    [
        (0.05, (0.012, 0.03), 12, "SLOWER", ""),  # the second half has no bound beyond 2%, and need not have one
        (0.05, (0.0, 0.0), 12, "UNRESOLVED", "a second batch of pairs did not confirm it"),
        (0.05, (0.05, 0.05), 9, "UNRESOLVED", "9 runs of each side; at least 10 are needed, half of them to confirm"),
    ],
)
def test_the_first_half_calls_and_the_second_confirms(tmp_path, first, second, count, verdict, why):
    slower = [first if index < count // 2 else second[index % 2] for index in range(count)]
    b = [reading(1 + 2 * index, 1e-3 * (1 + share)) for index, share in enumerate(slower)]
    found, _ = verdicts(tmp_path, series(0, 2, 1e-3, count=count), b)
    assert (found[0].verdict, found[0].reason) == (verdict, why)


def test_sides_that_are_not_two_are_refused(tmp_path):
    a, b = side(tmp_path, "a", series(0, 2, 1e-3)), side(tmp_path, "b", [*series(0, 2, 1e-3), *series(1, 2, 1e-3)])
    with pytest.raises(ValueError, match="^records: expected two sides, got the run run-0 of gemm/tiled .* on both$"):
        compare_files(a, b, RULES)
    with pytest.raises(ValueError, match="kernel: expected two or none"):
        compare_files(a, b, RULES, kernels=("tiled",))
    commits = series(30, 1, 1e-3, commit="a" * 40, dirty=False), series(45, 1, 1e-3, commit="a" * 40, dirty=True)
    both = side(tmp_path, "both", [*commits[0], *commits[1]])
    with pytest.raises(ValueError, match="^records: expected one commit in .*both.jsonl, got a{10}, a{10} and changes"):
        compare_files(a, both, RULES)


A = series(0, 2, 1e-3)
UNKNOWN = {"environment": environment("csv", "unknown")}


def b_side(**values):
    return series(1, 2, 1e-3, **values)


def unmeasured(status, reason):
    return [reading(1, 1e-3, status=status, reason=reason, latency_median_ms=None, samples=None)]


BROKEN = {
    "baseline missing": ([], b_side(), None),
    "kernel renamed": (A, b_side(kernel="renamed"), "MISSING"),
    "failing": (A, unmeasured("RUNTIME_ERROR", "it broke off"), "FAILED"),
    "newly incorrect": (A, unmeasured("INCORRECT", "error 3.0"), "INCORRECT"),
    "newly unsupported": (A, unmeasured("UNSUPPORTED", "needs sm100"), "FAILED"),
    "different GPU": (A, b_side(environment={**ENVIRONMENT, "gpu": {**GPU, "name": "NVIDIA H100"}}), "INVALID"),
    "different driver": (A, b_side(environment={**ENVIRONMENT, "gpu": {**GPU, "driver": "590.9"}}), "INVALID"),
    "above the roof": (A, [reading(1, 1e-3, status="INVALID", reason="1.4 times the memory ceiling")], "INVALID"),
    "noise": (A, [reading(1, 1e-3, status="NOISY", reason="the machine was busy")], "INVALID"),
    "timer of zero": (A, series(1, 2, 0.0), "INVALID"),
    "NaN samples": (A, b_side(samples=Record.packed([1e-3, math.nan])), "INVALID"),
    "another timing method": (A, b_side(timer="cuda graph replay"), "INVALID"),
    "gaps between launches": (A, b_side(timer="cuda events, launch gaps included"), "INVALID"),
    "one call a sample against several": (A, b_side(timer=f"{A[0].timer}, 4 calls per sample"), "INVALID"),
    "warm against cold": (series(0, 2, 1e-3, l2_state="warm"), b_side(l2_state="cold"), "INVALID"),
    "an unknown machine": (series(0, 2, 1e-3, **UNKNOWN), b_side(**UNKNOWN), "INVALID"),
    "predicted, not measured": (A, b_side(basis="predicted"), "INVALID"),
}
STATUS = {None: 13, "MISSING": 13, "INVALID": 13, "FAILED": 11, "INCORRECT": 11}


def test_what_cannot_be_compared_never_passes(tmp_path):
    for name, (a, b, verdict) in BROKEN.items():
        folders = [tmp_path / name / label for label in "ab"]
        for folder, records in zip(folders, (a, b), strict=True):
            folder.mkdir(parents=True)
            write(folder / "run.jsonl", *records)
        outcomes = compare_files(*folders, RULES)
        assert [outcome.verdict for outcome in outcomes] == ([verdict] if verdict else []), name
        assert exit_status(outcomes, strict=True) == exit_status(outcomes) == STATUS[verdict], name


def test_what_is_new_and_what_runs_nowhere_is_listed_and_not_judged(tmp_path):
    nowhere = {"status": "UNSUPPORTED", "reason": "needs sm100", "latency_median_ms": None, "samples": None}
    a = [*series(0, 2, 1e-3), reading(0, 1e-3, kernel="fp4", **nowhere)]
    b = [*series(1, 2, 1e-3), reading(1, 1e-3, kernel="fp4", **nowhere), *series(1, 2, 1e-3, kernel="fresh")]
    found, status = verdicts(tmp_path, a, b)
    assert [outcome.key for outcome in found] == ["gemm/tiled M=64 bf16"] and status == 0
    assert only_in(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == ["gemm/fresh M=64 bf16"]
