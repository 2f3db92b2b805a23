"""What `rooflab history` prints: rows and sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.report.trends.points import Points, commit_order, repository
from rooflab.bench.report.trends.trend import THRESHOLD, LevelStep, Trend, build_trends


def find_trends(points: Points, repo: Path | None, last: int, threshold: float = THRESHOLD) -> list[Trend]:
    """The trends; the git history of the checkout that `repo` (or the caller) is in orders their commits.

    Raises `ValueError` on a threshold below 0, or on too few points for a comparison.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a share of at least 0, got {threshold}")
    commits = [commit for commit in points.frame["commit"] if isinstance(commit, str)]
    places = commit_order(commits, repository(repo))
    return build_trends(points.frame, places, last, threshold) if len(points.frame) else []


def summary(points: Points, trends: Sequence[Trend]) -> dict[str, Any]:
    """The whole result as JSON values."""
    return {
        "files": points.files,
        "points": len(points.frame),
        "left_out": dict(points.left_out),
        "notes": notes(points, trends),
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


def _step(trend: Trend, step: LevelStep) -> dict[str, Any]:
    told = {name: value for name, value in vars(step).items() if name != "index"}
    return {"point": step.index, **told, "next": _next(trend, step)}


def _next(trend: Trend, step: LevelStep) -> str:
    """The command that finds the commit behind a regression, if a command can find it."""
    committed = trend.by_commit and "+" not in step.before + step.after and step.before != step.after
    if step.effect < 0 or step.cause or not committed:
        return ""
    scheme = f" --scheme {trend.key['scheme']}" if trend.key["scheme"] else ""
    name = f"{trend.key['op']} {trend.key['kernel']}"
    return f"rooflab bisect {name} --good {step.before} --bad {step.after} --case {trend.key['case']}{scheme}"


def notes(points: Points, trends: Sequence[Trend]) -> list[str]:
    """Sentences below the table: steps, suspects, the order of points, and records left out."""
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
    lines.append(f"{len(points.frame)} points of {points.files} files in {len(trends)} trends")
    if points.left_out:
        counted = ", ".join(f"{count} {reason}" for reason, count in points.left_out.items())
        lines.append(f"not in a trend: {counted}")
    return lines
