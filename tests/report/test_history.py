"""`rooflab history`: the records that become points, their order, the steps, and the meaning of the last point."""

import json
import math
import random
import re
from contextlib import chdir
from dataclasses import replace

import numpy as np
import pytest
from git_repository import git

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.report.trends.points import RecordFilter, commit_order, read_points, repository
from rooflab.bench.report.trends.trend import find_steps, find_trends, summary

GPU = {"name": "NVIDIA H200", "driver": "580.1"}
ENVIRONMENT = {"machine_key": "nvidia-h200-16c-1a2b3c4d", "gpu": GPU, "torch": "2.13.0", "triton": "3.7.1"}


def record(number, latency_ms, environment=None, **changes):
    """A time of the kernel `gemm/packed`, the `number`-th in order of time."""
    values = {
        "kind": "bench", "run_id": f"r{number:03}", "status": "OK", "op": "gemm", "kernel": "packed",
        "role": "optimized", "backend": "torch", "case_id": "M=64", "scheme": "bf16", "device": "cuda",
        "checked_by": "gpu", "basis": "measured", "latency_median_ms": latency_ms, "timer": "cuda events",
        "l2_state": "cold", "least_bytes": 4e6, "bound_fraction": 0.5,
        "timestamp": f"2026-01-01T{number // 60:02}:{number % 60:02}:00+00:00",
        "environment": ENVIRONMENT | (environment or {}),
    }  # fmt: skip
    return Record(**values | changes)


def noisy(count, sigma=0.005, seed=0, level=1.0):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


def records_of(values, **changes):
    return [record(i, value, **changes) for i, value in enumerate(values)]


def trends_of(folder, records, repo=None, last=20, **chosen):
    """The trends of a folder with these records, and their points."""
    record_files.write(folder / "records" / "a.jsonl", *records)
    points = read_points([folder / "records"], RecordFilter(**chosen))
    with chdir(repo or folder):
        order = commit_order((point.record.commit for point in points["points"]), repository())
    return find_trends(points["points"], order, last), points


def times_of(folder, records, repo=None):
    ((trend,), _) = trends_of(folder, records, repo)
    return [point.latency_ms for point in trend.points]


def test_what_failed_never_enters_a_trend_and_is_counted(tmp_path):
    untimed = {"basis": "bound"}
    wrong = [record(10, None, status="INCORRECT", reason="wrong", **untimed)] * 2
    wrong += [record(11, 9.0, status="INVALID", reason="above the roof"), record(12, None, kind="check", **untimed)]
    _, points = trends_of(tmp_path, [*records_of(noisy(6)), *wrong, record(13, None, **untimed)])
    assert len(points["points"]) == 6 and max(point.latency_ms for point in points["points"]) < 1.1
    assert points["left_out"] == {"INCORRECT": 2, "INVALID": 1, "of kind check": 1, "not measured": 1}


@pytest.mark.parametrize(
    ("changes", "environment"),
    [
        ({"kernel": "library"}, {}),
        ({"case_id": "M=65"}, {}),
        ({"scheme": "fp16"}, {}),
        ({"timer": "cuda graph"}, {}),
        ({"l2_state": "warm"}, {}),
        ({"clocks": {"locked_sm_clock_mhz": 1500}}, {}),
        ({}, {"machine_key": "another"}),
        ({}, {"gpu": GPU | {"driver": "570.2"}}),
        ({"device": "cpu"}, {"threads": 4}),
    ],
)
def test_what_cannot_be_compared_is_another_trend(tmp_path, changes, environment):
    trends, _ = trends_of(tmp_path, [*records_of([1.0] * 3), record(9, 1.0, environment, **changes)])
    assert sorted(len(trend.points) for trend in trends) == [1, 3]


def test_a_run_is_one_point_the_fastest_config_s_and_so_is_each_import(tmp_path):
    thrice = [replace(record(n, latency), run_id="r") for n, latency in enumerate((1.0, 2.0, 3.0))]
    assert times_of(tmp_path / "own", thrice) == [2.0]
    foreign = [replace(one, timer="imported: x") for one in thrice]
    assert times_of(tmp_path / "imported", foreign) == [1.0, 2.0, 3.0]
    times = [(1, 3.0), (1, 5.0), (2, 2.0), (2, 2.2), (3, 9.0)]
    searched = [record(1, latency, config={"BLOCK": size}) for size, latency in times]
    assert times_of(tmp_path / "searched", searched) == [pytest.approx(2.1)]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A checkout with four commits, and their names, oldest first."""
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "--quiet", "--initial-branch=main")
    for name in ("a", "b", "c", "d"):
        git(root, "commit", "--quiet", "--allow-empty", "--message", name)
    return root, git(root, "rev-list", "--reverse", "HEAD").split()


def test_points_are_in_the_order_of_commits_and_not_of_measuring(tmp_path, repo):
    root, commits = repo
    measured = [(3, 4.0), (0, 1.0), (2, 3.0), (1, 2.0), (0, 1.5)]
    records = [record(i, latency, commit=commits[place]) for i, (place, latency) in enumerate(measured)]
    assert times_of(tmp_path, records, root) == [1.0, 1.5, 2.0, 3.0, 4.0]


def test_an_unknown_commit_makes_it_the_order_of_time_and_says_so(tmp_path, repo):
    root, commits = repo
    records = [record(0, 2.0, commit=commits[1]), record(1, 1.0, commit="f" * 40)]
    (trend,), points = trends_of(tmp_path, records, root)
    assert not trend.by_commit and [point.latency_ms for point in trend.points] == [2.0, 1.0]
    assert any("1 of 1 trends are ordered by time" in note for note in summary(points, [trend])["notes"])
    assert commit_order([*commits, "f" * 40, "--all", ""], root) == {commit: i for i, commit in enumerate(commits)}
    assert commit_order(commits, None) == commit_order(commits, tmp_path) == {}
    with chdir(root):
        assert repository() == root.resolve()


@pytest.mark.parametrize("dirty", [False, True])
def test_a_regression_is_named_with_its_commits(tmp_path, repo, dirty):
    root, commits = repo
    values, places = noisy(8) + noisy(4, seed=1, level=1.06), [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2
    records = [
        record(i, value, commit=commits[place], dirty=dirty and place > 1)
        for i, (value, place) in enumerate(zip(values, places, strict=True))
    ]
    (trend,), points = trends_of(tmp_path, records, root)
    (step,) = trend.steps
    assert (step["point"], trend.state) == (8, "SLOWER") and step["effect"] == pytest.approx(0.06, abs=0.01)
    good, bad = commits[1][:10], commits[2][:10]
    assert (step["before"], step["after"]) == (good, bad + "+" * dirty)
    (row,) = summary(points, [trend])["trends"]
    assert [round(level[2], 1) for level in row["levels_ms"]] == [1.0, 1.1]


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ([1.3], "SUSPECT"),
        ([1.3, 1.3], "SLOWER"),
        ([0.7], "SUSPECT"),
        ([0.7, 0.7], "FASTER"),
        ([1.3, 1.0], "STEADY"),
        ([1.015], "STEADY"),
    ],
)
def test_one_slow_point_is_suspect_and_a_second_one_confirms(tmp_path, tail, state):
    ((trend,), _) = trends_of(tmp_path, records_of(noisy(12, 0.002) + tail))
    assert trend.state == state


def test_levels_restart_at_marks_and_a_step_there_has_another_cause(tmp_path):
    values = noisy(8) + noisy(8, seed=1, level=0.9)
    records = [record(i, value, {"triton": "3.6.0" if i < 8 else "3.7.1"}) for i, value in enumerate(values)]
    ((trend,), _) = trends_of(tmp_path, records)
    (step,) = trend.steps
    assert trend.marks == {8: step["cause"]} == {8: "triton 3.6.0 -> 3.7.1"} and step["point"] == 8 and abs(trend.z) < 4
    ((trend,), _) = trends_of(tmp_path / "new", records[:13])
    assert trend.z is None, "the old level is no measure of the new one"


def test_the_command_line_shows_a_row_for_each_kernel_or_each_case(rooflab, tmp_path):
    """`packed` is 10% slower in one case and 30% in the other."""
    slow, slower = (noisy(8) + noisy(6, seed=1, level=level) for level in (1.1, 1.3))
    ours = [*records_of(slow), *records_of(slower, case_id="M=65")]
    record_files.write(tmp_path / ".rooflab" / "a.jsonl", *ours, *records_of(slow, kernel="naive"))
    status, out, _ = rooflab("history")
    assert status == 0 and "42 points of 1 files in 3 trends" in out
    assert re.search(r"packed +2 +28 +2 SLOWER +\+(29|30|31)\.\d% at", out), "the worst of its steps"
    assert re.search(r"packed +M=65 .* SLOWER", rooflab("history", "--kernel", "packed")[1])
    status, out, _ = rooflab("history", ".rooflab", "--kernel", "naive", "--json")
    found = json.loads(out)
    assert status == 0 and [row["kernel"] for row in found["trends"]] == ["naive"] and found["points"] == 14
    record_files.write(tmp_path / "small" / "a.jsonl", *records_of([1.0] * 8 + [1.03] * 8))
    assert "SLOWER" in rooflab("history", "small")[1], "of 2% on a change counts"
    assert "SLOWER" not in rooflab("history", "small", "--threshold", "0.04")[1]
    assert rooflab("history", "nowhere")[0] == 2


SERIES = 50
FIVE_PERCENT = math.log(1.05)


@pytest.mark.parametrize(("count", "spikes", "most"), [(5, 0.0, 0.0), (20, 0.0, 0.02), (20, 0.1, 0.04)])
def test_noise_alone_has_no_steps(count, spikes, most):
    """Not even where a tenth of the points are far too slow."""
    rng = np.random.default_rng(2)
    values = rng.normal(size=(SERIES, count)) + 8 * (rng.random((SERIES, count)) < spikes)
    assert sum(bool(find_steps(row)) for row in (0.01 * values).tolist()) <= most * SERIES


@pytest.mark.parametrize(("sigma", "after", "least"), [(0.005, 2, 0.95), (0.01, 3, 0.7), (0.02, 10, 0.55)])
def test_a_step_of_five_percent_is_found_where_it_is(sigma, after, least):
    values = sigma * np.random.default_rng(3).normal(size=(SERIES, 12 + after))
    values[:, 12:] += FIVE_PERCENT
    found = sum(any(abs(start - 12) <= 1 for start in find_steps(row)) for row in values.tolist())
    assert found >= least * SERIES


def test_one_slow_run_is_no_step_and_two_steps_are_two():
    values = 0.005 * np.random.default_rng(5).normal(size=36)
    values[12:24] += FIVE_PERCENT
    values[24:] -= FIVE_PERCENT
    assert find_steps(values.tolist()) == [12, 24]
    values = 0.005 * np.random.default_rng(4).normal(size=30)
    values[10] += 0.5
    assert find_steps(values.tolist()) == []


def test_few_points_and_equal_points_have_no_steps():
    for values in ([], [1.0], [1.0, 2.0, 3.0], [1.0] * 20):
        assert find_steps(values) == []
    assert find_steps([0.0] * 6 + [FIVE_PERCENT] * 6) == [6], "a clock's grid makes runs equal; the step is no less one"
