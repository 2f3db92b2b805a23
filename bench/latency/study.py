"""A study: a claim that is often made, what arithmetic predicts of it, what this machine measures, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args

from matplotlib.ticker import LogLocator, NullFormatter

from rooflab.bench.latency.ledger import seconds_of
from rooflab.bench.report.pictures.canvas import INK, LOST, READ, WIDTH_IN, WRITTEN, new_figure, note, save
from rooflab.engine.llm import LLM
from rooflab.roofline.plot import own_settings

Verdict = Literal["holds", "holds in part", "fails", "NOISY"]
"""`NOISY`: the machine was busy, and the times decide nothing."""
COLOURS = (READ, WRITTEN, LOST, INK)
PREDICTED = ", predicted"
"""The end of the name of a curve that was not measured; the figure has it dashed."""


@dataclass(frozen=True)
class Study:
    """The result of a study, and how its figure is drawn."""

    claim: str
    source: str
    """The authors of the claim."""
    rows: list[dict[str, Any]]
    """The table; all rows have the same columns."""
    verdict: Verdict
    number: str
    """The reason of the verdict, with the numbers that decide it."""
    about: str
    """The engine, and the requests that it ran."""
    x: str
    """The column of the horizontal axis."""
    curves: Mapping[str, str]
    """The name of each curve, and the column of its values."""
    x_label: str
    y_label: str
    band: tuple[str, str] | None = None
    """The columns of the 20th and 80th percentiles of the first curve."""
    log: bool = False
    """Whether both axes are logarithmic."""
    name: str = ""
    """The name in `STUDIES`."""

    @own_settings
    def draw(self, folder: Path) -> Path:
        """Writes the figure, and returns its path."""
        figure = new_figure(WIDTH_IN, 4.3)
        figure.suptitle(fill(self.claim, int(9 * WIDTH_IN)), fontsize=11, weight="bold", x=0.01, ha="left")
        axes, column = figure.subplots(), {name: [row[name] for row in self.rows] for name in self.rows[0]}
        colours = dict(zip(dict.fromkeys(name.removesuffix(PREDICTED) for name in self.curves), COLOURS, strict=False))
        for name, values in self.curves.items():
            style = "--" if name.endswith(PREDICTED) else "o-"
            axes.plot(column[self.x], column[values], style, color=colours[name.removesuffix(PREDICTED)], label=name)
        if self.band:
            low, high = (column[name] for name in self.band)
            axes.fill_between(column[self.x], low, high, color=COLOURS[0], alpha=0.15)
        axes.set_xlabel(self.x_label, fontsize=9)
        axes.set_ylabel(self.y_label, fontsize=9)
        if self.log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:,g}")
        else:
            axes.set_ylim(0, 1.08 * axes.dataLim.ymax)
        axes.legend(fontsize=9, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.45, -0.18))
        note(figure, [f"{self.verdict}: {self.number}", self.about])
        return save(figure, folder / f"{self.name}.png")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 20th and 80th percentiles."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return statistics.median(ordered), low, high


def run_all_s(llm: LLM) -> float:
    """Runs steps until all requests have ended; returns the seconds of the steps."""
    seconds = 0.0
    while llm.has_work:
        seconds += seconds_of(llm.step)
    return seconds


def at_least(number: float, holds: float, part: float) -> Verdict:
    """`holds` from one number on, `holds in part` from a lower one on."""
    return "holds" if number >= holds else "holds in part" if number >= part else "fails"


def at_most(number: float, holds: float, part: float) -> Verdict:
    """`holds` up to one number, `holds in part` up to a higher one."""
    return at_least(-number, -holds, -part)


def worst(*verdicts: Verdict) -> Verdict:
    """The verdict of a claim with several parts, each of which must hold."""
    return max(verdicts, key=get_args(Verdict).index)


@dataclass
class Lab:
    """Makes the engines that studies run on."""

    model: str = "smollm2-135m"
    dummy: bool = False
    quick: bool = False
    """Whether sizes are small, for tests."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of every engine, as those of `LLM`."""
    engines: list[tuple[str, str, str]] = field(default_factory=list)
    """The model, dtype and device of each engine that the last study loaded."""

    def llm(self, **options: Any) -> LLM:
        """An engine with these options of `LLM`."""
        llm = LLM(self.model, **{"dummy": self.dummy, "overlap": False, **self.options, **options})
        self.engines.append((llm.arch.name, llm.dtype_name, llm.device.type))
        return llm

    def size(self, whole: int, quick: int) -> int:
        """The second of two sizes if the lab is quick, else the first."""
        return quick if self.quick else whole

    def about(self, llm: LLM) -> str:
        """The model, dtype and device of an engine, in words."""
        return f"{llm.arch.name} in {llm.dtype_name} on {llm.device.type}"
