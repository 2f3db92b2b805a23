"""A study: a claim that is often made, what arithmetic predicts of it, what this machine measures, and a verdict."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args

from matplotlib.ticker import LogLocator, NullFormatter

from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.report.pictures.canvas import INK, LOST, READ, WIDTH_IN, WRITTEN, new_figure, note, save
from rooflab.engine.llm import LLM
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.plot import own_settings

Verdict = Literal["holds", "holds in part", "fails", "not tested", "NOISY"]
"""`not tested`: this machine lacks what the claim is about; `NOISY`: it was busy, and the times decide nothing."""
COLOURS = (READ, WRITTEN, LOST, INK)


PREDICTED = ", predicted"
"""How the name of a curve ends that was not measured; it is dashed."""


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    panel: int = 0
    """0: this machine; 1: an H100 by published times of kernels."""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    """Of what was measured, where it was measured more than once."""


def curves(
    rows: Sequence[Mapping[str, Any]], x: str, columns: Mapping[str, str], far: int = 0, band: str = ""
) -> Iterator[Curve]:
    """A curve against the column `x` for each name in `columns`, with the column of its values.

    `far`: how many times as large `x` is in the H100's panel, where the curve then lies.  `band`: whose name has the
    columns `low_ms` and `high_ms` too.
    """
    for name, column in columns.items():
        xs, ys, *ends = ([row[key] for row in rows] for key in (x, column, *(("low_ms", "high_ms") * (name == band))))
        yield Curve(name, [far * own for own in xs] if far else xs, ys, int(far > 0), *ends)


@dataclass(frozen=True)
class Study:
    """What came out."""

    claim: str
    source: str
    """Who makes the claim."""
    rows: list[dict[str, Any]]
    verdict: Verdict
    number: str
    """The verdict's reason, with the number."""
    curves: Sequence[Curve] = ()
    x: str = ""
    far_x: str = ""
    """Of the H100's panel, if it has another one."""
    y: str = ""
    log: bool = False
    about: str = ""
    """What was run."""
    name: str = ""
    """That of its file."""

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[dict[str, Any]]]]:
        """Columns and rows of each table: rows with the same columns are one."""
        for columns in dict.fromkeys(map(tuple, self.rows)):
            yield columns, [row for row in self.rows if tuple(row) == columns]

    @own_settings
    def draw(self, folder: Path) -> Path:
        """Writes the figure, and returns its path."""
        panels = sorted({curve.panel for curve in self.curves})
        figure = new_figure(WIDTH_IN, 1.0 + 3.3 * len(panels))
        figure.suptitle(fill(self.claim, int(9 * WIDTH_IN)), fontsize=11, weight="bold", x=0.01, ha="left")
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            own = [curve for curve in self.curves if curve.panel == panel]
            names = list(dict.fromkeys(curve.name.removesuffix(PREDICTED) for curve in own))
            for curve in own:
                colour = COLOURS[names.index(curve.name.removesuffix(PREDICTED)) % len(COLOURS)]
                style = "--" if curve.name.endswith(PREDICTED) else "o-"
                axes.plot(curve.x, curve.y, style, color=colour, label=curve.name)
                if curve.low is not None and curve.high is not None:
                    axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15)
            title = ("this machine", "H100 SXM, published kernel times")[panel]
            axes.set_title(title, fontsize=10, loc="left", weight="bold")
            axes.set_xlabel(self.far_x if panel and self.far_x else self.x, fontsize=9)
            axes.set_ylabel(self.y, fontsize=9)
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
    """What studies run on: an engine of this machine, and kernel times of an H100."""

    model: str = "smollm2-135m"
    dummy: bool = False
    quick: bool = False
    """Smaller, for tests."""
    options: Mapping[str, Any] = field(default_factory=dict)
    engines: list[tuple[str, str, str]] = field(default_factory=list)
    """Model, dtype and device of the engines that this study loaded."""

    def llm(self, **options: Any) -> LLM:
        """An engine."""
        llm = LLM(self.model, **{"dummy": self.dummy, "overlap": False, **self.options, **options})
        self.engines.append((llm.arch.name, llm.dtype_name, llm.device.type))
        return llm

    @cached_property
    def h100(self) -> KernelTimes:
        """Llama-3.1-8B on an H100."""
        return KernelTimes(get_architecture("llama-3.1-8b"), get_device("h100-sxm"))

    def size(self, whole: int, quick: int) -> int:
        """One of two sizes."""
        return quick if self.quick else whole

    def prompts(self, llm: LLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
        """Random token ids."""
        draw = random.Random(seed)
        return [draw.choices(range(llm.arch.vocab_size), k=length) for _ in range(count)]

    def about(self, llm: LLM) -> str:
        """The engine, in words."""
        return f"{llm.arch.name} in {llm.dtype_name} on {llm.device.type}"
