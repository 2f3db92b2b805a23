"""Computes the trend of a kernel's time over many runs.  A trend holds the times in order, and the lasting changes
among them.  It also says whether the newest time is slower, faster, steady or unusual."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from rooflab.bench.base.plain import Row
from rooflab.bench.report.sources import grouped
from rooflab.bench.report.trends.points import CIRCUMSTANCES, KEY_FIELDS, TrendPoint, key_of

MIN_NOISE = 1e-3
"""The lower limit of the noise, in log units (0.1%): with a coarse clock several runs can be exactly equal."""
_MEAN_TO_SIGMA, _MAD_TO_SIGMA = 2 / math.sqrt(math.pi), 1.4826
"""For normal values: the mean |x - y| of two over the deviation sigma, and sigma over the median |x - median|."""
TrendState = Literal["SHORT", "STEADY", "SLOWER", "FASTER", "SUSPECT"]
COMPARED_POINTS = 20
"""The number of points before a new point, on the same level, with which the new point is compared."""
CHANGE_THRESHOLD = 0.02
"""The smallest relative change that counts, as in an A/B."""
MIN_HISTORY = 5
"""The smallest number of points for a comparison."""
_BARS = "▁▂▃▄▅▆▇█"
MAX_SPARK_POINTS = 24


def find_steps(logs: Sequence[float]) -> list[int]:
    """Finds lasting changes in a series of times. Returns the index of the first time after each change.

    `logs` are the natural logarithms of the times, in order. The function cuts the series into pieces of 2 or more
    points. It chooses the cuts with the lowest cost:

        sum of all deviations / noise  +  (4 + 1.5 ln n) * (number of pieces - 1)

    The deviation of a point is its distance from its piece's median. `noise` is one standard deviation, and n is the
    number of points. The run time is quadratic in n. A squared deviation would give one slow run too much weight.

    `tests/report/test_history.py` simulates such series. With normal noise, at most 1% of the series show a false
    change. If every tenth run is slow by 8 deviations, 2% of the series show one. A change of 5 deviations is found in
    over 75% of series with 3 points after it, and in 98% with 5."""
    if len(logs) < 4:
        return []
    # A few steps raise the mean difference of neighbours only a little.
    norm_values = np.asarray(logs, float) / max(MIN_NOISE, float(np.abs(np.diff(logs)).mean()) / _MEAN_TO_SIGMA)
    step_cost = 4.0 + 1.5 * math.log(len(norm_values))
    best_partitions: list[tuple[float, list[int]]] = [(0.0, []), (math.inf, [])]
    """By number n of points: the least cost of the first n points, and the indices at which their pieces begin."""
    for j in range(2, len(norm_values) + 1):
        partition_costs = (
            (best_partitions[i][0] + step_cost + float(np.abs(norm_values[i:j] - np.median(norm_values[i:j])).sum()), i)
            for i in range(j - 1)
        )
        lowest_cost, i = min(partition_costs)
        best_partitions.append((lowest_cost, [*best_partitions[i][1], i]))
    return best_partitions[-1][1][1:]


@dataclass(frozen=True)
class Trend:
    """Holds the times of one kernel on one case and machine, in order."""

    key: Mapping[str, str]
    points: Sequence[TrendPoint]
    by_commit: bool
    """Whether the points are in the order of the git history.  Otherwise they are in the order of their times."""
    marks: Mapping[int, str]
    """By point, what changed outside of our own code."""
    steps: tuple[Row, ...]
    """The lasting changes of the time.  `point` is the index of the first point after the step, and `effect` the ratio
    of the levels minus one: 0.05 is 5% slower.  `before` and `after` are the commits, or else the times, of the points
    beside it.  `cause` is what else changed there, such as `triton 3.6.0 -> 3.7.1`; empty if only the code changed."""
    z: float | None
    """The robust z of the last point against the level before it.  None if that level is too short."""
    state: TrendState
    """The state of the last point."""

    @property
    def levels(self) -> list[tuple[int, int, float]]:
        """Returns start index, end index and median ms of each level.  A step or a software change begins a level."""
        level_edges = [*sorted({0, *self.marks, *(step["point"] for step in self.steps)}), len(self.points)]
        latencies_ms = [point.latency_ms for point in self.points]
        return [(i, j, float(np.median(latencies_ms[i:j]))) for i, j in pairwise(level_edges)]

    @property
    def name(self) -> str:
        """Returns a text with the op, kernel, case and scheme of the trend."""
        return "{op}/{kernel} {case} {scheme}".format(**self.key).rstrip()

    def row(self) -> dict[str, Any]:
        """Returns the trend as one row of a table."""
        newest_step = self.steps[-1] if self.steps else {}
        return {
            **self.key,
            "points": len(self.points),
            "order": "commits" if self.by_commit else "time",
            "trend": sparkline([point.latency_ms for point in self.points]),
            "latest_ms": self.points[-1].latency_ms,
            "latest": label(self.points[-1], self.by_commit),
            "z": self.z,
            "state": self.state,
            "last_step": newest_step.get("effect"),
            "step_at": newest_step.get("after"),
        }


def find_trends(
    points: Iterable[TrendPoint],
    places: Mapping[str, int],
    last: int = COMPARED_POINTS,
    threshold: float = CHANGE_THRESHOLD,
) -> list[Trend]:
    """Returns one trend for each kernel, case and machine, sorted by the values of `KEY_FIELDS`.  `places` gives the
    position of each known commit in the git history.

    Raises `ValueError` if `threshold` is below 0, or if `last` is too small for a comparison."""
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a share of at least 0, got {threshold}")
    if last < MIN_HISTORY:
        raise ValueError(f"last: expected at least {MIN_HISTORY} points, got {last}")
    keys = sorted(grouped(points, lambda point: key_of(point.record)).items(), key=lambda item: item[0])
    return [_trend(dict(zip(KEY_FIELDS, key, strict=True)), group, places, last, threshold) for key, group in keys]


def _trend(
    key: Mapping[str, str], points: Sequence[TrendPoint], places: Mapping[str, int], last: int, limit: float
) -> Trend:
    has_commits = all(point.record.commit in places for point in points)

    def place(point: TrendPoint) -> tuple[object, ...]:
        return places[str(point.record.commit)] if has_commits else 0, point.record.timestamp, point.record.run_id

    sorted_points = sorted(points, key=place)
    log_ms, marks = np.log([point.latency_ms for point in sorted_points]), _marks(sorted_points)
    names = [label(point, has_commits) for point in sorted_points]
    level_edges = [0, *find_steps(log_ms.tolist()), len(log_ms)]
    level_steps: list[Row] = []
    for level_begin, index, level_end in zip(level_edges[:-2], level_edges[1:-1], level_edges[2:], strict=True):
        step_change = math.expm1(float(np.median(log_ms[index:level_end]) - np.median(log_ms[level_begin:index])))
        step = {"point": index, "effect": step_change, "before": names[index - 1], "after": names[index]}
        level_steps.append(step | {"cause": marks.get(index, "")})
    z, is_last_outlier = _judge(
        log_ms, max(index for index in (0, *marks, *level_edges[:-1]) if index < len(log_ms)), last, limit
    )
    state: TrendState = "SHORT" if z is None else "STEADY"
    if level_steps and len(log_ms) - level_steps[-1]["point"] <= last and abs(level_steps[-1]["effect"]) > limit:
        state = "SLOWER" if level_steps[-1]["effect"] > 0 else "FASTER"
    return Trend(key, sorted_points, has_commits, marks, tuple(level_steps), z, "SUSPECT" if is_last_outlier else state)


def _marks(ordered: Sequence[TrendPoint]) -> dict[int, str]:
    """Returns texts on changes of software or config between neighbouring trend points, by the later point's index."""
    changes = {}
    for point_index, (old_values, new_values) in enumerate(pairwise(point.circumstances for point in ordered), 1):
        value_pairs = zip(CIRCUMSTANCES, old_values, new_values, strict=True)
        changes[point_index] = ", ".join(
            f"{name} {old_value} -> {new_value}" for name, old_value, new_value in value_pairs if old_value != new_value
        )
    return {point_index: text for point_index, text in changes.items() if text}


def _judge(logs: np.ndarray, begin: int, last: int, limit: float) -> tuple[float | None, bool]:
    """Compares a series' last time with the times before it. Returns its robust z-score, and whether it is unusual.

    `logs` are the times' logarithms. At most `last` earlier times count, from index `begin` on. An unusual time differs
    from their median by more than the share `limit`, with a z-score beyond `3.5 * (1 + 6 / n)` for `n` earlier times.

    The 3.5 is from Iglewicz and Hoaglin, "How to detect and handle outliers", 1993. The factor allows for few times.
    About 0.5% of normally distributed times have a larger z-score."""
    past_log_ms, value = logs[max(begin, len(logs) - 1 - last) : -1], float(logs[-1])
    if len(past_log_ms) < MIN_HISTORY:
        return None, False
    median_log_ms = float(np.median(past_log_ms))
    z = (value - median_log_ms) / max(MIN_NOISE, _MAD_TO_SIGMA * float(np.median(np.abs(past_log_ms - median_log_ms))))
    return z, abs(z) > 3.5 * (1 + 6 / len(past_log_ms)) and abs(math.expm1(value - median_log_ms)) > limit


def label(point: TrendPoint, by_commit: bool) -> str:
    """Returns the name of a point: its commit, or else its time.  A `+` after the commit means uncommitted changes."""
    commit, (date, _, time_of_day) = point.record.commit, point.record.timestamp.partition("T")
    if not commit:
        return f"{date} {time_of_day[:5]}"
    name = commit[:10] + ("+" if point.record.dirty else "")
    return name if by_commit else f"{name} {date}"


def sparkline(values: Sequence[float]) -> str:
    """Draws the newest values as block characters.  The scale covers at least a factor of 1.1, so noise looks flat."""
    log_ms = [math.log(latency_ms) for latency_ms in values[-MAX_SPARK_POINTS:]]
    min_log_ms, max_log_ms = min(log_ms), max(log_ms)
    mid_log, log_span = (min_log_ms + max_log_ms) / 2, max(max_log_ms - min_log_ms, math.log(1.1))
    return "".join(_BARS[min(len(_BARS) - 1, int(((log - mid_log) / log_span + 0.5) * len(_BARS)))] for log in log_ms)


def summary(found: Row, trends: Sequence[Trend]) -> dict[str, Any]:
    """Returns all trends and the counts of their points as JSON values."""
    return {
        **found,
        "points": len(found["points"]),
        "notes": notes(found, trends),
        "trends": [
            {**trend.row(), "levels_ms": trend.levels, "marks": trend.marks, "steps": trend.steps} for trend in trends
        ],
    }


def notes(found: Row, trends: Sequence[Trend]) -> list[str]:
    """Returns the sentences below the table of trends: steps, unusual points and omitted records."""
    lines = []
    for trend in trends:
        for step in trend.steps:
            cause = f", where {step['cause']}" if step["cause"] else ""
            lines.append(f"{trend.name}: {step['effect']:+.1%} between {step['before']} and {step['after']}{cause}")
        if trend.state == "SUSPECT":
            lines.append(f"{trend.name}: the last point is unusual (z = {trend.z:+.1f}); a second one will tell")
    num_by_time = sum(not trend.by_commit for trend in trends)
    if num_by_time:
        lines.append(f"{num_by_time} of {len(trends)} trends are ordered by time: a commit of theirs is not known here")
    mark_counts = Counter(text for trend in trends for text in trend.marks.values())
    lines += [f"marked in {count} trends: {text}" for text, count in mark_counts.most_common()]
    lines.append(f"{len(found['points'])} points of {found['files']} files in {len(trends)} trends")
    if found["left_out"]:
        omitted_text = ", ".join(f"{count} {omit_reason}" for omit_reason, count in found["left_out"].items())
        lines.append(f"not in a trend: {omitted_text}")
    return lines
