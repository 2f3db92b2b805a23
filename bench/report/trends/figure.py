"""Figures of trends: one PNG per op, a panel per case, scheme and machine, a line per kernel."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from rooflab.bench.report.trends.trend import Trend, label

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
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for op, own in by_op.items():
        name = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in op)
        path = folder / f"history-{name}.png"
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        _figure(op, own).savefig(partial, dpi=110, format="png")
        partial.replace(path)
        paths.append(path)
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
