"""Trends: the points of one key in order, their levels, the steps between them, and what the last point means.

An exact optimal partition cuts the series into pieces of constant level, with L1 cost and a price for each step.  It
minimises, over every way to cut the series, the sum of |x - median of its piece| in units of the noise, plus `penalty`
for each cut: Jackson et al., "An algorithm for optimal partitioning of data on an interval", IEEE Signal Processing
Letters 12 (2005).  The cost is L1 because one slow run must not shift a level as it shifts a mean.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from rooflab.bench.report.trends.points import CIRCUMSTANCES, KEY

MIN_PIECE = 2
"""Least points of a level: one slow run is not a step."""
LEAST_NOISE = 1e-3
"""Lower limit of the noise, in log units (0.1%): a clock's resolution can make several runs exactly equal."""
_MEAN_TO_SIGMA = 2 / math.sqrt(math.pi)
"""Converts the mean |x - y| of two independent normal values to their standard deviation."""


def penalty(points: int) -> float:
    """The price of a step, in standard deviations of the noise: 4 + 1.5 ln n.

    Chosen on simulated series.  Without a step, the rate of false steps is at most 1% for normal, Laplace or Student-t
    series of 5 to 100 points, 2% if every tenth run is 8 deviations slow, and 6% if neighbours correlate by 0.4.  A
    step of 5 deviations is found in over 75% of series with 3 points after it, and in 98% with 5 (checked by
    `tests/test_history.py`).
    """
    return 4.0 + 1.5 * math.log(max(points, 1))


def noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise from the mean difference of neighbours, which a few steps hardly raise."""
    differences = np.abs(np.diff(np.asarray(values, float)))
    return max(LEAST_NOISE, float(differences.mean()) / _MEAN_TO_SIGMA) if len(differences) else LEAST_NOISE


def costs(values: Sequence[float]) -> np.ndarray:
    """L1 cost of every piece `values[i:j]` at [i, j], (n, n + 1); infinite if j <= i.

    Each row adds its values in order: a new value costs its distance to the interval of medians of earlier values.
    """
    count = len(values)
    table = np.full((count, count + 1), np.inf)
    for start in range(count):
        ordered: list[float] = []
        cost = 0.0
        for end, value in enumerate(values[start:], start):
            if ordered:
                low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
                cost += max(low - value, value - high, 0.0)
            bisect.insort(ordered, value)
            table[start, end + 1] = cost
    return table


def partition(values: Sequence[float], price: float, min_piece: int = MIN_PIECE) -> list[int]:
    """First indices of all pieces after the first in the cheapest partition; empty if one level is cheapest.

    Quadratic in time: 90 ms for 500 points. Raises `ValueError` on values that are not finite.
    """
    if not np.isfinite(np.asarray(values, float)).all():
        raise ValueError("values: expected finite numbers, got one that is not")
    count = len(values)
    if count < 2 * min_piece:
        return []
    table = costs(values)
    best = np.full(count + 1, np.inf)
    best[0] = -price
    begins = np.zeros(count + 1, dtype=int)
    for end in range(min_piece, count + 1):
        totals = best[: end - min_piece + 1] + table[: end - min_piece + 1, end] + price
        begins[end] = int(totals.argmin())
        best[end] = totals[begins[end]]
    found: list[int] = []
    end = count
    while end > 0:
        end = int(begins[end])
        found.append(end)
    return sorted(found)[1:]


def find_steps(logs: Sequence[float]) -> list[int]:
    """Indices of the first points after a change of level in `logs`, natural logarithms of times in order."""
    scaled = np.asarray(logs, float) / noise(logs)
    return partition(scaled.tolist(), penalty(len(logs)))


State = Literal["SHORT", "STEADY", "SLOWER", "FASTER", "SUSPECT"]
LAST = 20
"""Number of points of the same level with which a new point is compared."""
THRESHOLD = 0.02
"""Least relative change that counts, as in an A/B."""
LEAST_HISTORY = 5
"""Least number of points for a comparison."""
_MAD_TO_SIGMA = 1.4826
_BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 24


def unusual_z(points: int) -> float:
    """The robust z beyond which a point is unusual, if the spread was estimated from this number of points.

    3.5 (Iglewicz and Hoaglin, "How to detect and handle outliers", 1993), widened for a short history, whose spread is
    uncertain: about 0.5% of normal points lie beyond it at any length.
    """
    return 3.5 * (1 + 6 / points)


@dataclass(frozen=True)
class LevelStep:
    """A change of level."""

    index: int
    """Index of the first point after the step."""
    effect: float
    """Ratio of the levels minus one: 0.05 is 5% slower."""
    before: str
    """The commit, or else the time, of the last point before the step."""
    after: str
    """The commit, or else the time, of the first point after the step."""
    cause: str
    """What else changed at the step, such as `triton 3.6.0 -> 3.7.1`; empty if only the code changed."""


@dataclass(frozen=True)
class Trend:
    """The points of one key in order."""

    key: Mapping[str, str]
    frame: pd.DataFrame
    by_commit: bool
    """Whether the points follow the git history; otherwise they follow their times."""
    marks: Mapping[int, str]
    """By point, what changed there outside our own code."""
    steps: tuple[LevelStep, ...]
    z: tuple[float | None, ...]
    """The robust z of each point against the level before it; None if that level is too short."""
    state: State
    """State of the last point."""

    @property
    def restarts(self) -> list[int]:
        """Indices at which levels begin: the first point, every step and every mark."""
        return sorted({0, *self.marks, *(step.index for step in self.steps)})

    @property
    def levels(self) -> list[tuple[int, int, float]]:
        """First point, one past the last point, and median in ms of each level."""
        edges = [*self.restarts, len(self.frame)]
        latency = self.frame["latency_ms"].to_numpy()
        return [(a, b, float(np.median(latency[a:b]))) for a, b in zip(edges[:-1], edges[1:], strict=True)]

    def row(self) -> dict[str, Any]:
        """One row of the table."""
        last = self.steps[-1] if self.steps else None
        return {
            **self.key,
            "points": len(self.frame),
            "order": "commits" if self.by_commit else "time",
            "trend": sparkline(self.frame["latency_ms"].tolist()),
            "latest_ms": float(self.frame["latency_ms"].iloc[-1]),
            "latest": label(self.frame.iloc[-1], self.by_commit),
            "z": self.z[-1],
            "state": self.state,
            "last_step": None if last is None else last.effect,
            "step_at": None if last is None else last.after,
        }


def build_trends(
    frame: pd.DataFrame, places: Mapping[str, int], last: int = LAST, threshold: float = THRESHOLD
) -> list[Trend]:
    """One trend per key, in order of the keys.  `places` is each known commit's place in the history."""
    if last < LEAST_HISTORY:
        raise ValueError(f"last: expected at least {LEAST_HISTORY} points, got {last}")
    found = []
    for values, points in frame.groupby(list(KEY), sort=True):
        key = dict(zip(KEY, map(str, values if isinstance(values, tuple) else (values,)), strict=True))
        found.append(_trend(key, points, places, last, threshold))
    return found


def _trend(key: Mapping[str, str], points: pd.DataFrame, places: Mapping[str, int], last: int, limit: float) -> Trend:
    by_commit = bool(points["commit"].isin(list(places)).all())
    place = points["commit"].map(places) if by_commit else pd.Series(0, index=points.index)
    ordered = points.assign(place=place).sort_values(["place", "time", "run_id"]).reset_index(drop=True)
    logs = np.log(ordered["latency_ms"].to_numpy(float))
    marks = _marks(ordered)
    starts = find_steps(logs.tolist())
    judged = _judge(logs, sorted({0, *marks, *starts}), marks, last, limit)
    # Two unusual points in sequence on the same side are a step, even if the new level is short.
    sides = [side for _, side in judged]
    if len(sides) > 1 and sides[-1] and sides[-1] == sides[-2] and len(logs) - 2 not in starts:
        starts = [*starts, len(logs) - 2]
    steps = tuple(_step(index, starts, logs, ordered, by_commit, marks) for index in starts)
    z = tuple(score for score, _ in judged)
    return Trend(key, ordered, by_commit, marks, steps, z, _state(z[-1], sides[-1], steps, len(logs), last, limit))


def _marks(ordered: pd.DataFrame) -> dict[int, str]:
    """What changed from one point to the next."""
    marks: dict[int, list[str]] = {}
    for name in CIRCUMSTANCES:
        values = [None if pd.isna(value) else str(value) for value in ordered[name]]
        for index in range(1, len(values)):
            if values[index] != values[index - 1]:
                marks.setdefault(index, []).append(f"{name} {values[index - 1]} -> {values[index]}")
    return {index: ", ".join(texts) for index, texts in sorted(marks.items())}


def _judge(
    logs: np.ndarray, restarts: Sequence[int], marks: Mapping[int, str], last: int, limit: float
) -> list[tuple[float | None, int]]:
    """For each point, its robust z against the level of the previous point, and its side: 1 if unusually slow, -1 if
    unusually fast, otherwise 0."""
    found: list[tuple[float | None, int]] = []
    for index, value in enumerate(logs.tolist()):
        begin = max((start for start in restarts if start < index), default=0)
        before = logs[max(begin, index - last) : index]
        if index in marks or len(before) < LEAST_HISTORY:
            found.append((None, 0))
            continue
        middle = float(np.median(before))
        z = (value - middle) / max(LEAST_NOISE, _MAD_TO_SIGMA * float(np.median(np.abs(before - middle))))
        beyond = abs(z) > unusual_z(len(before)) and abs(math.expm1(value - middle)) > limit
        found.append((z, (1 if z > 0 else -1) if beyond else 0))
    return found


def _step(
    index: int,
    starts: Sequence[int],
    logs: np.ndarray,
    ordered: pd.DataFrame,
    by_commit: bool,
    marks: Mapping[int, str],
) -> LevelStep:
    edges = [0, *starts, len(logs)]
    where = edges.index(index)
    before, after = np.median(logs[edges[where - 1] : index]), np.median(logs[index : edges[where + 1]])
    names = [label(ordered.iloc[point], by_commit) for point in (index - 1, index)]
    return LevelStep(index, math.expm1(float(after - before)), names[0], names[1], marks.get(index, ""))


def _state(z: float | None, side: int, steps: Sequence[LevelStep], count: int, last: int, limit: float) -> State:
    step = steps[-1] if steps else None
    if side and (step is None or step.index < count - 2):
        return "SUSPECT"
    if step is not None and count - step.index <= last and abs(step.effect) > limit:
        return "SLOWER" if step.effect > 0 else "FASTER"
    return "SHORT" if z is None else "STEADY"


def label(point: pd.Series, by_commit: bool) -> str:
    """The name of a point: its commit, with a + if the checkout had changes, or its time."""
    commit = point["commit"]
    if not isinstance(commit, str) or not commit:
        return f"{point['time']:%Y-%m-%d %H:%M}"
    name = commit[:10] + ("+" if point["dirty"] else "")
    return name if by_commit else f"{name} {point['time']:%Y-%m-%d}"


def sparkline(values: Sequence[float]) -> str:
    """The last values as blocks on a log scale; the full height is at least a factor of 1.1, so noise looks flat."""
    logs = [math.log(value) for value in values[-SPARK_POINTS:]]
    low, high = min(logs), max(logs)
    middle, height = (low + high) / 2, max(high - low, math.log(1.1))
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int(((log - middle) / height + 0.5) * len(_BLOCKS)))] for log in logs)
