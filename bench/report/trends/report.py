"""What `rooflab history` says: trends from record files, as rows, sentences, a table file and figures."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rooflab.bench.report.trends.commits import commit_order, repository
from rooflab.bench.report.trends.points import KEY, Chosen, Points, read_points
from rooflab.bench.report.trends.trend import THRESHOLD, Step, Trend, build_trends

__all__ = ["Chosen", "History", "history", "notes", "write"]


@dataclass(frozen=True)
class History:
    """The points that were read."""

    points: Points

    def trends(self, repo: Path | None, last: int, threshold: float = THRESHOLD) -> list[Trend]:
        """The trends, their commits ordered by the history of the checkout that `repo` (or the caller) is in.

        Raises `ValueError` on a threshold below 0 or too few points to compare with.
        """
        if not threshold >= 0:
            raise ValueError(f"threshold: expected a share of at least 0, got {threshold}")
        commits = [commit for commit in self.points.frame["commit"] if isinstance(commit, str)]
        places = commit_order(commits, repository(repo))
        return build_trends(self.points.frame, places, last, threshold) if len(self.points.frame) else []

    def summary(self, trends: Sequence[Trend]) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "files": self.points.files,
            "points": len(self.points.frame),
            "left_out": dict(self.points.left_out),
            "notes": notes(self, trends),
            "trends": [
                {
                    **trend.row(),
                    "levels_ms": [list(level) for level in trend.levels],
                    "marks": {str(index): text for index, text in trend.marks.items()},
                    "steps": [_step(trend, step) for step in trend.steps],
                }
                for trend in trends
            ],
        }


def history(paths: Sequence[Path], chosen: Chosen | None = None) -> History:
    """The history of every record below `paths`.  Raises `ValueError` where `points.read_points` does."""
    return History(read_points(paths, chosen))


def _step(trend: Trend, step: Step) -> dict[str, Any]:
    return {
        "point": step.index,
        "effect": step.effect,
        "before": step.before,
        "after": step.after,
        "cause": step.cause,
        "next": _next(trend, step),
    }


def _next(trend: Trend, step: Step) -> str:
    """The command that finds the commit behind a regression, where one can."""
    committed = trend.by_commit and "+" not in step.before + step.after and step.before != step.after
    if step.effect < 0 or step.cause or not committed:
        return ""
    scheme = f" --scheme {trend.key['scheme']}" if trend.key["scheme"] else ""
    name = f"{trend.key['op']} {trend.key['kernel']}"
    return f"rooflab bisect {name} --good {step.before} --bad {step.after} --case {trend.key['case']}{scheme}"


def notes(made: History, trends: Sequence[Trend]) -> list[str]:
    """Sentences below the table: steps, suspects, the order of points, and what is not in it."""
    lines = []
    for trend in trends:
        name = f"{trend.key['op']}/{trend.key['kernel']} {trend.key['case']} {trend.key['scheme']}".rstrip()
        for step in trend.steps:
            cause = f", where {step.cause}" if step.cause else ""
            lines.append(f"{name}: {step.effect:+.1%} between {step.before} and {step.after}{cause}")
            if _next(trend, step):
                lines.append(f"  {_next(trend, step)}")
        if trend.state == "SUSPECT":
            lines.append(f"{name}: the last point is unusual (z = {trend.z[-1]:+.1f}); a second one will tell")
    by_time = sum(not trend.by_commit for trend in trends)
    if by_time:
        lines.append(f"{by_time} of {len(trends)} trends are ordered by time: a commit of theirs is not known here")
    marks = Counter(text for trend in trends for text in trend.marks.values())
    lines += [f"marked in {count} trends: {text}" for text, count in marks.most_common()]
    points = made.points
    lines.append(f"{len(points.frame)} points of {points.files} files in {len(trends)} trends")
    if points.left_out:
        counted = ", ".join(f"{count} {reason}" for reason, count in points.left_out.items())
        lines.append(f"not in a trend: {counted}")
    return lines


def write(trends: Sequence[Trend], csv: Path | None, out: Path | None) -> list[Path]:
    """Writes the points in order to `csv` and figures to `out`, where they are given; the paths."""
    paths = []
    if csv is not None:
        partial = csv.with_name(f"{csv.name}.{os.getpid()}.tmp")
        csv.parent.mkdir(parents=True, exist_ok=True)
        frame(trends).to_csv(partial, index=False)
        partial.replace(csv)
        paths.append(csv)
    if out is not None:
        from rooflab.bench.report.trends.figure import draw_trends

        paths += draw_trends(trends, out)
    return paths


def frame(trends: Sequence[Trend]) -> pd.DataFrame:
    """Every point of every trend in order, with its level, its z and the mark before it."""
    parts = []
    for trend in trends:
        levels = [level for start, end, level in trend.levels for _ in range(start, end)]
        numbers = [number for number, (start, end, _) in enumerate(trend.levels) for _ in range(start, end)]
        marks = [trend.marks.get(index, "") for index in range(len(trend.frame))]
        part = trend.frame.drop(columns="place")
        parts.append(part.assign(z=pd.Series(trend.z, dtype=float), level=numbers, level_ms=levels, mark=marks))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(KEY))
