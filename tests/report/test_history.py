"""`rooflab history`: what becomes a point, in which order, where steps lie, and what the last point says."""

import itertools
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from git_repository import git
from test_bars import record as record_of

from rooflab.bench.core import record_files
from rooflab.bench.report.trends.points import RecordFilter, commit_order, read_points, repository
from rooflab.bench.report.trends.trend import find_steps, find_trends, summary

GPU = {"name": "NVIDIA H200", "driver": "580.1"}
ENVIRONMENT = {"machine_key": "nvidia-h200-16c-1a2b3c4d", "gpu": GPU, "torch": "2.13.0", "triton": "3.7.1"}


def record(number, latency_ms, environment=None, **changes):
    """A time of the kernel `gemm/packed`, the `number`-th in order of time."""
    values = {
        "run_id": f"r{number:03}", "timestamp": f"2026-01-01T{number // 60:02}:{number % 60:02}:00+00:00",
        "environment": ENVIRONMENT | (environment or {}), "latency_median_ms": latency_ms, "timer": "cuda events",
        "l2_state": "cold", "backend": "torch",
    }  # fmt: skip
    return replace(record_of("packed", "M=64", 1.0), **(values | changes))


def noisy(count, sigma=0.005, seed=0, level=1.0):
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(count)]


def trends_of(folder, records, last=20, repo=None, **chosen):
    record_files.write(folder / "records" / "a.jsonl", *records)
    return find_trends(read_points([folder / "records"], RecordFilter(**chosen)), repo or folder, last)


def test_what_failed_never_enters_a_trend_and_is_counted(tmp_path):
    records = [record(i, latency) for i, latency in enumerate(noisy(6))]
    untimed = {"basis": "bound"}
    wrong = [record(10, None, status="INCORRECT", reason="wrong", **untimed)] * 2
    wrong += [record(11, 9.0, status="INVALID", reason="above the roof")]
    other = [record(12, None, kind="check", **untimed), record(13, None, **untimed)]
    record_files.write(tmp_path / "a" / "b" / "deep.jsonl", *records, *wrong, *other)
    points = read_points([tmp_path])
    assert len(points.frame) == 6 and points.frame["latency_ms"].max() < 1.1
    assert points.left_out == {"INCORRECT": 2, "INVALID": 1, "of kind check": 1, "not measured": 1}
    assert sum(points.left_out.values()) + 6 == len(records + wrong + other), "nothing is dropped silently"


def test_what_cannot_be_compared_is_another_trend(tmp_path):
    for number, (changes, environment) in enumerate(
        (
            ({"kernel": "library"}, {}),
            ({"case_id": "M=65"}, {}),
            ({"scheme": "fp16"}, {}),
            ({"timer": "cuda graph"}, {}),
            ({"l2_state": "warm"}, {}),
            ({"clocks": {"locked_sm_clock_mhz": 1500}}, {}),
            ({}, {"machine_key": "another"}),
            ({}, {"gpu": GPU | {"driver": "570.2"}}),
            ({"device": "cpu"}, {"threads": 4}),
        )
    ):
        records = [record(i, 1.0) for i in range(3)] + [record(9, 1.0, environment, **changes)]
        trends = trends_of(tmp_path / str(number), records)
        assert sorted(len(trend.frame) for trend in trends) == [1, 3], (changes, environment)
    records = [record(i, 1.0, timer=f"cpu perf_counter, {i + 2} calls per sample") for i in range(4)]
    assert len(trends_of(tmp_path / "same", records)) == 1, "calls per sample are no other method"


def test_a_run_is_one_point_and_so_is_each_import(tmp_path):
    twice = [record(1, latency, timestamp=f"2026-01-01T00:0{i}:00Z") for i, latency in enumerate((1.0, 2.0, 3.0))]
    assert trends_of(tmp_path / "own", twice)[0].frame["latency_ms"].tolist() == [2.0]
    foreign = [record(1, each.latency_median_ms, timestamp=each.timestamp, timer="imported: x") for each in twice]
    assert trends_of(tmp_path / "imported", foreign)[0].frame["latency_ms"].tolist() == [1.0, 2.0, 3.0]


def test_of_a_run_that_timed_several_configs_the_fastest_is_the_point(tmp_path):
    times = [(1, 3.0), (1, 5.0), (2, 2.0), (2, 2.2), (3, 9.0)]
    records = [record(1, latency, config={"BLOCK": size}) for size, latency in times]
    (point,) = trends_of(tmp_path, records)[0].frame.to_dict("records")
    assert point["latency_ms"] == pytest.approx(2.1) and point["config"] == '{"BLOCK": 2}'


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A checkout with a side branch, merged, and its commits oldest first."""
    root = tmp_path_factory.mktemp("repo")
    git(root, "init", "--quiet", "--initial-branch=main")
    for name in ("a", "b", "c", "d"):
        git(root, "commit", "--quiet", "--allow-empty", "--message", name)
    return root, git(root, "rev-list", "--reverse", "HEAD").split()


def test_points_are_in_the_order_of_commits_and_not_of_measuring(tmp_path, repo):
    root, commits = repo
    measured = [(3, 4.0), (0, 1.0), (2, 3.0), (1, 2.0), (0, 1.5)]
    records = [record(i, latency, commit=commits[place]) for i, (place, latency) in enumerate(measured)]
    trend = trends_of(tmp_path, records, repo=root)[0]
    assert trend.by_commit and trend.frame["latency_ms"].tolist() == [1.0, 1.5, 2.0, 3.0, 4.0]


def test_an_unknown_commit_makes_it_the_order_of_time_and_says_so(tmp_path, repo):
    root, commits = repo
    records = [
        record(i, latency, commit=commit) for i, (latency, commit) in enumerate(((2.0, commits[1]), (1.0, "f" * 40)))
    ]
    record_files.write(tmp_path / "a.jsonl", *records)
    points = read_points([tmp_path])
    trends = find_trends(points, root, 20)
    assert not trends[0].by_commit and trends[0].frame["latency_ms"].tolist() == [2.0, 1.0]
    assert any("1 of 1 trends are ordered by time" in note for note in summary(points, trends)["notes"])


def test_commits_of_no_repository_have_no_order(tmp_path, repo):
    root, commits = repo
    assert commit_order([*commits, "f" * 40, "--all", ""], root) == {commit: i for i, commit in enumerate(commits)}
    assert commit_order(commits, None) == {} and commit_order(commits, tmp_path) == {}
    assert repository(root) == root.resolve()


def test_a_regression_is_named_with_its_commits_and_the_way_to_find_it(tmp_path, repo):
    root, commits = repo
    values = noisy(8) + noisy(4, seed=1, level=1.06)
    places = [0] * 4 + [1] * 4 + [2] * 2 + [3] * 2
    records = [
        record(i, value, commit=commits[place]) for i, (value, place) in enumerate(zip(values, places, strict=True))
    ]
    record_files.write(tmp_path / "a.jsonl", *records)
    points = read_points([tmp_path])
    trends = find_trends(points, root, 20)
    (step,) = trends[0].steps
    assert (step.point, trends[0].state) == (8, "SLOWER") and step.effect == pytest.approx(0.06, abs=0.01)
    assert (step.before, step.after) == (commits[1][:10], commits[2][:10])
    (row,) = summary(points, trends)["trends"]
    wanted = f"rooflab bisect gemm packed --good {commits[1][:10]} --bad {commits[2][:10]} --case M=64 --scheme bf16"
    assert row["steps"][0]["next"] == wanted
    assert [round(level[2], 1) for level in row["levels_ms"]] == [1.0, 1.1]
    record_files.write(
        tmp_path / "dirty" / "a.jsonl",
        *(replace(each, dirty=place > 1) for each, place in zip(records, places, strict=True)),
    )
    points = read_points([tmp_path / "dirty"])
    (row,) = summary(points, find_trends(points, root, 20))["trends"]
    assert row["steps"][0]["after"] == commits[2][:10] + "+" and row["steps"][0]["next"] == "", "no commit to bisect"


def test_one_slow_point_is_suspect_and_a_second_one_confirms(tmp_path):
    before = noisy(12, 0.002)
    for number, (tail, state) in enumerate(
        (
            *(([1.3], "SUSPECT"), ([1.3, 1.3], "SLOWER"), ([0.7], "SUSPECT"), ([0.7, 0.7], "FASTER")),
            *(([1.3, 1.0], "STEADY"), ([1.0], "STEADY"), ([1.015], "STEADY")),
        )
    ):
        records = [record(i, value) for i, value in enumerate(before + tail)]
        assert trends_of(tmp_path / str(number), records)[0].state == state, tail
    short = trends_of(tmp_path / "short", [record(i, value) for i, value in enumerate([1.0, 1.0, 1.0, 1.0, 5.0])])[0]
    assert short.state == "SHORT" and short.z is None, "a short history says nothing"


def test_levels_restart_at_marks_and_a_step_there_has_another_cause(tmp_path):
    values = noisy(8) + noisy(8, seed=1, level=0.9)
    records = [record(i, value, {"triton": "3.6.0" if i < 8 else "3.7.1"}) for i, value in enumerate(values)]
    trend = trends_of(tmp_path, records)[0]
    assert trend.marks == {8: "triton 3.6.0 -> 3.7.1"}
    (step,) = trend.steps
    assert (step.point, step.cause) == (8, "triton 3.6.0 -> 3.7.1") and abs(trend.z) < 4
    (trend,) = trends_of(tmp_path / "new", records[:13])
    assert trend.z is None, "the old level is no measure of the new one"


def test_a_choice_of_nothing_names_what_there_is(tmp_path):
    with pytest.raises(ValueError, match="none of 1 records is chosen; their ops are gemm"):
        trends_of(tmp_path, [record(0, 1.0)], ops=("rope",))
    assert len(trends_of(tmp_path, [], machines=("h200",))) == 1
    with pytest.raises(ValueError, match="^records: expected a file or folder"):
        read_points([tmp_path / "none"])
    with pytest.raises(ValueError, match="^last: expected at least 5 points, got 1"):
        find_trends(read_points([tmp_path]), tmp_path, 1)


def test_the_command_line_shows_and_writes(rooflab, tmp_path):
    values = noisy(8) + noisy(6, seed=1, level=1.1)
    records = [record(i, value, kernel=kernel) for i, value in enumerate(values) for kernel in ("packed", "naive")]
    record_files.write(tmp_path / ".rooflab" / "a.jsonl", *records)
    more = [replace(one, case_id="M=65") for one in records if one.kernel == "packed"]
    record_files.write(tmp_path / "more" / "b.jsonl", *records, *more)
    assert re.search(r"packed +2 +28 +2 SLOWER +\+\d+\.\d% at", rooflab("history", "more")[1]), "one row a kernel"
    assert re.search(r"packed +M=65 .* SLOWER", rooflab("history", "more", "--kernel", "packed")[1])
    status, out, _ = rooflab("history")
    assert status == 0 and "SLOWER" in out and re.search(r"\+\d+\.\d% at", out)
    assert "28 points of 1 files in 2 trends" in out
    status, out, _ = rooflab("history", ".rooflab", "--kernel", "naive", "--json")
    found = json.loads(out)
    assert status == 0 and [row["kernel"] for row in found["trends"]] == ["naive"] and found["points"] == 14
    assert rooflab("history", "nowhere")[0] == 2


SERIES = 100
FIVE_PERCENT = math.log(1.05)


def draw(kind, rng, count):
    """Noise of standard deviation about one."""
    values = rng.normal(0, 1, count)
    if kind == "spikes":
        values[rng.random(count) < 0.1] += 8
    return values


def cost_of(values, starts):
    edges = [0, *starts, len(values)]
    return sum(np.abs(values[a:b] - np.median(values[a:b])).sum() for a, b in itertools.pairwise(edges))


def test_the_partition_is_the_cheapest_of_all():
    rng = np.random.default_rng(1)
    every = [
        starts
        for count in range(4)
        for starts in itertools.combinations(range(2, 8), count)
        if all(b - a >= 2 for a, b in itertools.pairwise([0, *starts, 9]))
    ]
    for height in (2.0, 4.0, 8.0) * 20:
        values = rng.normal(size=9) + np.repeat(rng.normal(0, height, 3), 3)
        scaled = values / (np.abs(np.diff(values)).mean() * math.sqrt(math.pi) / 2)
        price = 4 + 1.5 * math.log(9)
        cheapest = min(cost_of(scaled, starts) + price * len(starts) for starts in every)
        found = find_steps(values.tolist())
        assert cost_of(scaled, found) + price * len(found) == pytest.approx(cheapest)
        assert all(b - a >= 2 for a, b in itertools.pairwise([0, *found, 9]))


@pytest.mark.parametrize(("kind", "most"), [("normal", 0.01), ("spikes", 0.03)])
def test_noise_alone_has_no_steps(kind, most):
    rng = np.random.default_rng(2)
    for count in (5, 12, 40):
        false = sum(bool(find_steps((draw(kind, rng, count) * 0.01).tolist())) for _ in range(SERIES))
        assert false <= most * SERIES, f"{false} of {SERIES} series of {count} points"


@pytest.mark.parametrize(
    ("sigma", "after", "least"), [(0.005, 2, 0.95), (0.01, 3, 0.7), (0.01, 5, 0.95), (0.02, 10, 0.55)]
)
def test_a_step_of_five_percent_is_found_where_it_is(sigma, after, least):
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(SERIES):
        values = sigma * draw("normal", rng, 12 + after)
        values[12:] += FIVE_PERCENT
        found += any(abs(start - 12) <= 1 for start in find_steps(values.tolist()))
    assert found >= least * SERIES


def test_one_slow_run_is_no_step_and_two_steps_are_two():
    values = 0.005 * np.random.default_rng(4).normal(size=30)
    values[10] += 0.5
    assert find_steps(values.tolist()) == []
    values = 0.005 * np.random.default_rng(5).normal(size=36)
    values[12:24] += FIVE_PERCENT
    values[24:] -= FIVE_PERCENT
    assert find_steps(values.tolist()) == [12, 24]


def test_few_points_and_equal_points_have_no_steps():
    for values in ([], [1.0], [1.0, 2.0, 3.0], [1.0] * 20):
        assert find_steps(values) == []
    assert find_steps([0.0] * 6 + [FIVE_PERCENT] * 6) == [6], "a clock's grid makes runs equal; the step is no less one"
    with pytest.raises(ValueError, match="^values: expected finite"):
        find_steps([1.0, math.nan, 1.0, 1.0])
