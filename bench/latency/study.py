"""Defines a latency study.  A study tests a well-known claim with a prediction and a measurement on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args

from matplotlib.ticker import LogLocator, NullFormatter

from rooflab.bench.latency.ledger import seconds_of
from rooflab.bench.report.pictures.canvas import (
    FIGURE_WIDTH_IN,
    INK,
    LOST,
    READ_COLOUR,
    WRITTEN,
    new_figure,
    note,
    save,
)
from rooflab.engine.llm import LLM
from rooflab.roofline.plot import with_own_settings

Verdict = Literal["holds", "holds in part", "fails", "NOISY"]
"""The verdict of a study.  `NOISY`: the machine was busy, so that the times decide nothing."""
CURVE_COLOURS = (READ_COLOUR, WRITTEN, LOST, INK)
PREDICTED_SUFFIX = ", predicted"
"""The end of a curve's name, if the curve was not measured.  The figure draws such a curve dashed."""


@dataclass(frozen=True)
class Study:
    """Holds the result of a study (claim, table, verdict), and the settings of its figure."""

    claim: str
    source: str
    """The authors of the claim."""
    rows: list[dict[str, Any]]
    """The rows of the table.  All rows have the same columns."""
    verdict: Verdict
    number: str
    """The reason for the verdict, with the numbers that decide it."""
    about: str
    """The engine and the requests of the study, in words."""
    x: str
    """The column for the horizontal axis."""
    curves: Mapping[str, str]
    """The name of each curve, and the column with its values."""
    x_label: str
    y_label: str
    band: tuple[str, str] | None = None
    """The columns of the 20th and 80th percentiles of the first curve."""
    log: bool = False
    """Whether both axes are logarithmic."""
    name: str = ""
    """The study's name in `STUDIES`."""

    @with_own_settings
    def draw(self, folder: Path) -> Path:
        """Draws the figure of the study and writes it into `folder`.  Returns the path of the file."""
        figure = new_figure(FIGURE_WIDTH_IN, 4.3)
        figure.suptitle(fill(self.claim, int(9 * FIGURE_WIDTH_IN)), fontsize=11, weight="bold", x=0.01, ha="left")
        axes, columns = figure.subplots(), {name: [row[name] for row in self.rows] for name in self.rows[0]}
        colours = dict(
            zip(dict.fromkeys(name.removesuffix(PREDICTED_SUFFIX) for name in self.curves), CURVE_COLOURS, strict=False)
        )
        for name, values in self.curves.items():
            style = "--" if name.endswith(PREDICTED_SUFFIX) else "o-"
            axes.plot(
                columns[self.x], columns[values], style, color=colours[name.removesuffix(PREDICTED_SUFFIX)], label=name
            )
        if self.band:
            low_values, high_values = (columns[name] for name in self.band)
            axes.fill_between(columns[self.x], low_values, high_values, color=CURVE_COLOURS[0], alpha=0.15)
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
    """Returns the median, the 20th percentile and the 80th percentile of `values`."""
    sorted_values = sorted(values)
    low_quantile, high_quantile = (sorted_values[round(quantile * (len(sorted_values) - 1))] for quantile in (0.2, 0.8))
    return statistics.median(sorted_values), low_quantile, high_quantile


def run_all_s(llm: LLM) -> float:
    """Runs engine steps until all requests have ended.  Returns the total time of these steps in seconds."""
    total_s = 0.0
    while llm.has_work:
        total_s += seconds_of(llm.step)
    return total_s


def at_least(number: float, holds: float, part: float) -> Verdict:
    """Returns a verdict on a measured `number`, where larger is better.  The verdict is "holds" from the limit `holds`
    up.  Below, it is "holds in part" from the limit `part` up.  Otherwise it is "fails"."""
    return "holds" if number >= holds else "holds in part" if number >= part else "fails"


def at_most(number: float, holds: float, part: float) -> Verdict:
    """Returns a verdict on a measured `number`, where smaller is better.  The verdict is "holds" up to the limit
    `holds`.  Above, it is "holds in part" up to the limit `part`.  Otherwise it is "fails"."""
    return at_least(-number, -holds, -part)


def worst(*verdicts: Verdict) -> Verdict:
    """Returns the worst of several verdicts, one for each part of a claim.  A claim holds only if every part holds."""
    return max(verdicts, key=get_args(Verdict).index)


@dataclass
class Lab:
    """Holds the model and options of the latency studies, creates their engines, and chooses full or small sizes."""

    model: str = "smollm2-135m"
    dummy: bool = False
    quick: bool = False
    """Whether studies use small sizes, for tests."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for every engine, with the names of `LLM`'s options."""
    engines: list[tuple[str, str, str]] = field(default_factory=list)
    """For each engine that the last study loaded: the model, the dtype and the device."""

    def llm(self, **options: Any) -> LLM:
        """Creates an engine with the given options of `LLM`."""
        llm = LLM(self.model, **{"dummy": self.dummy, "overlap": False, **self.options, **options})
        self.engines.append((llm.arch.name, llm.dtype_name, llm.device.type))
        return llm

    def size(self, whole: int, quick: int) -> int:
        """Returns `quick` if the studies run with small sizes (`self.quick`), else `whole`."""
        return quick if self.quick else whole

    def about(self, llm: LLM) -> str:
        """Returns a text with the model, the dtype and the device of an engine."""
        return f"{llm.arch.name} in {llm.dtype_name} on {llm.device.type}"
