"""What `rooflab history` prints and writes: rows, sentences, a CSV file, and one figure for each op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from rooflab.bench.records.files import write_whole
from rooflab.bench.report.trends.points import KEY, Points, commit_order, repository
from rooflab.bench.report.trends.trend import THRESHOLD, Step, Trend, build_trends, label


def find_trends(points: Points, repo: Path | None, last: int, threshold: float = THRESHOLD) -> list[Trend]:
    """The trends, their commits ordered by the history of the checkout that `repo` (or the caller) is in.

    Raises `ValueError` on a threshold below 0 or too few points to compare with.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold: expected a share of at least 0, got {threshold}")
    commits = [commit for commit in points.frame["commit"] if isinstance(commit, str)]
    places = commit_order(commits, repository(repo))
    return build_trends(points.frame, places, last, threshold) if len(points.frame) else []


def summary(points: Points, trends: Sequence[Trend]) -> dict[str, Any]:
    """Everything as JSON values."""
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


def _step(trend: Trend, step: Step) -> dict[str, Any]:
    told = {name: value for name, value in vars(step).items() if name != "index"}
    return {"point": step.index, **told, "next": _next(trend, step)}


def _next(trend: Trend, step: Step) -> str:
    """The command that finds the commit behind a regression, where one can."""
    committed = trend.by_commit and "+" not in step.before + step.after and step.before != step.after
    if step.effect < 0 or step.cause or not committed:
        return ""
    scheme = f" --scheme {trend.key['scheme']}" if trend.key["scheme"] else ""
    name = f"{trend.key['op']} {trend.key['kernel']}"
    return f"rooflab bisect {name} --good {step.before} --bad {step.after} --case {trend.key['case']}{scheme}"


def notes(points: Points, trends: Sequence[Trend]) -> list[str]:
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
    lines.append(f"{len(points.frame)} points of {points.files} files in {len(trends)} trends")
    if points.left_out:
        counted = ", ".join(f"{count} {reason}" for reason, count in points.left_out.items())
        lines.append(f"not in a trend: {counted}")
    return lines


def write(trends: Sequence[Trend], csv: Path | None, out: Path | None) -> list[Path]:
    """Writes the points in order to `csv` and figures to `out`, where they are given; the paths."""
    paths = []
    if csv is not None:
        paths.append(write_whole(csv, frame(trends).to_csv(index=False)))
    if out is not None:
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


COLUMNS = 2
PANEL_INCHES = (7.0, 3.0)
MAX_TICKS = 8
LOG_RANGE = 4
"""Slowest over fastest from which a panel is drawn in logarithms."""
PANEL = ("case", "scheme", "machine", "setting", "timer")


def draw_trends(trends: Iterable[Trend], folder: Path) -> list[Path]:
    """Writes `history-<op>.png` for each op; their paths."""
    by_op: dict[str, list[Trend]] = {}
    for trend in trends:
        by_op.setdefault(trend.key["op"], []).append(trend)
    paths = []
    for op, own in by_op.items():
        name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in op)
        content = BytesIO()
        _figure(op, own).savefig(content, dpi=110, format="png")
        paths.append(write_whole(folder / f"history-{name}.png", content.getvalue()))
    return paths


def _figure(op: str, trends: Sequence[Trend]) -> Figure:
    panels: dict[tuple[str, ...], list[Trend]] = {}
    for trend in trends:
        panels.setdefault(tuple(trend.key[name] for name in PANEL), []).append(trend)
    rows = -(-len(panels) // COLUMNS)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * min(COLUMNS, len(panels)), 0.5 + height * rows), layout="constrained")
    figure.suptitle(f"{op}: median latency over commits", fontsize="medium")
    for number, (key, own) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(rows, min(COLUMNS, len(panels)), number)
        _panel(axes, own)
        values = dict(zip(PANEL, key, strict=True))
        circumstances = ", ".join(part for part in (values["machine"], values["setting"], values["timer"]) if part)
        title = " ".join(part for part in (values["case"], values["scheme"]) if part)
        axes.set_title(f"{title}\n{circumstances}", fontsize="x-small", loc="left")
    return figure


def _panel(axes: Any, trends: Sequence[Trend]) -> None:
    """The trends of one panel over the same points in order; a level ends at a step or a mark."""
    in_commits = all(trend.by_commit for trend in trends)
    positions = [_positions(trend, in_commits) for trend in trends]
    order = {position: number for number, position in enumerate(sorted({each for own in positions for each in own}))}
    names: dict[int, str] = {}
    for number, (trend, own) in enumerate(zip(trends, positions, strict=True)):
        x = [order[position] for position in own]
        names |= {place: label(point, in_commits) for place, (_, point) in zip(x, trend.frame.iterrows(), strict=True)}
        _line(axes, trend, x, f"C{number}")
        for line, (index, text) in enumerate(trend.marks.items()):
            axes.axvline(x[index] - 0.5, color="grey", linewidth=0.8, linestyle=":")
            if number == 0:
                place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
                below = (2, -8 - 8 * (line % 4))  # texts of neighbouring marks must not cover one another
                axes.annotate(text, (x[index] - 0.5, 1), below, fontsize="xx-small", color="grey", **place)
    latencies = [value for trend in trends for value in trend.frame["latency_ms"]]
    if max(latencies) > LOG_RANGE * min(latencies):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.set_ylabel("ms", fontsize="x-small")
    axes.tick_params(labelsize="xx-small")
    axes.margins(y=0.25)
    shown = sorted(names)[:: -(-len(names) // MAX_TICKS)]
    axes.set_xticks(shown, [names[place] for place in shown], rotation=15, ha="right")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(fontsize="xx-small", loc="best")


def _line(axes: Any, trend: Trend, x: Sequence[int], colour: str) -> None:
    """Points with their 20th to 80th percentile, levels, and the size of each step."""
    latency = trend.frame["latency_ms"].tolist()
    axes.plot(x, latency, "o", color=colour, markersize=3.5, label=f"{trend.key['kernel']} ({trend.state})")
    axes.vlines(x, trend.frame["p20_ms"].tolist(), trend.frame["p80_ms"].tolist(), color=colour, alpha=0.35)
    for start, end, level in trend.levels:
        axes.plot([x[start] - 0.3, x[end - 1] + 0.3], [level, level], color=colour, linewidth=1.4)
    for step in trend.steps:
        where = (x[step.index], latency[step.index])
        axes.annotate(f"{step.effect:+.1%}", where, (4, 6), textcoords="offset points", fontsize="x-small")


def _positions(trend: Trend, in_commits: bool) -> list[tuple[Any, int]]:
    """By what each point is ordered among those of other trends: place in the history or time, then turn there."""
    turns: Counter[Any] = Counter()
    found = []
    for place in trend.frame["place" if in_commits else "time"]:
        found.append((place, turns[place]))
        turns[place] += 1
    return found
