"""Where the kernels would stand: predicted times beside a library's published ones, for the bars that compare the two.

    python results/standing.py --gpu h100 --out results/published/standing.md

A kernel's time is expected between the tenth and the ninetieth percentile of what public kernels of its kind took of
their predicted time (`predict/public.py`).  A bar WOULD be MET or MISSED only if that is so at both ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from targets.gemm import SKINNY_RUNGS
from targets.judge import AGAINST_LIBRARY
from targets.target import AcceptanceTarget

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.predict import public
from rooflab.bench.predict.calibration import kind_of
from rooflab.bench.predict.explain import Explanation, explain
from rooflab.bench.predict.model import LEAST, SUSTAINED
from rooflab.bench.predict.public import Errors
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.published import Time, times_of

WOULD_MEET, WOULD_MISS, CANNOT_TELL = "WOULD MEET", "WOULD MISS", "CANNOT TELL"
WIDEST = 10


@dataclass(frozen=True)
class Standing:
    """One case of a bar: the best of its rungs by prediction, and the library."""

    case: Case
    best: Explanation
    library: Time

    @property
    def ratio(self) -> float:
        """The library's time over the predicted one."""
        return (self.library.seconds or 0.0) * 1e3 / (self.best.predicted_ms or 0.0)

    @property
    def cause(self) -> str:
        """The largest part of the prediction that another kernel could avoid."""
        parts = [part for part in self.best.parts if part.name not in (LEAST, SUSTAINED)]
        largest = max(parts, key=lambda part: part.ms)
        return f"{largest.name}, {largest.ms * 1e3:.1f} us: {largest.why}"


@dataclass(frozen=True)
class Expected:
    """A bar, and what is expected of it."""

    bar: AcceptanceTarget
    cases: tuple[Standing, ...]
    band: tuple[float, float]
    """Least and most time expected, over the predicted time."""
    error: Errors
    """Of predictions of this kind."""

    @property
    def geomean(self) -> float:
        """Of the library's time over the predicted one."""
        return geometric_mean(standing.ratio for standing in self.cases)

    @property
    def verdict(self) -> str:
        """At both ends of the band."""
        needed, (least, most) = float(self.bar.arguments["geomean"]), self.band
        if self.geomean / most >= needed:
            return WOULD_MEET
        return WOULD_MISS if self.geomean / least < needed else CANNOT_TELL

    def row(self) -> dict[str, str]:
        """One row of the table of bars."""
        least, most = self.band
        return {
            "bar": self.bar.id.removeprefix("bar:"),
            "needed": f"{self.bar.arguments['geomean']:.2f}",
            "cases": f"{len(self.cases)} of {len(self.bar.arguments['cases'])}",
            "library / predicted": f"{self.geomean:.2f}",
            "expected": f"{self.geomean / most:.2f} to {self.geomean / least:.2f}",
            "median error": f"{self.error.median:.0%}",
            "verdict": self.verdict,
        }


def band(kind: str) -> tuple[float, float]:
    """The tenth and the ninetieth percentile of published over predicted time, of the public kernels of a kind."""
    own = public.read().query("kind == @kind")
    ratios = sorted(own["published_us"] / own["predicted_us"])
    return ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def expected(device: Device, bars: Sequence[AcceptanceTarget]) -> list[Expected]:
    """What is expected of each bar with cases of which the library's time is published; the others are left out."""
    found = []
    for bar in bars:
        arguments: Mapping[str, Any] = bar.arguments
        if "geomean" not in arguments:
            continue
        op, scheme = arguments["op"], get_scheme(arguments.get("scheme", "bf16"))
        libraries: dict[Case, Time] = {}
        for text in arguments["cases"]:
            case = registry.get_op(op).check_case(Case.parse(text))
            times = [time for time in times_of(op, scheme.name, case, device.name) if time.table.framework == "vllm"]
            if times:
                libraries[case] = min(times, key=lambda time: time.seconds or 0.0)
        rungs = arguments.get("rungs") or (SKINNY_RUNGS if "slow_share" in arguments else ())
        names = rungs or [kernel.name for kernel in registry.kernels(op).values() if kernel.role == "optimized"]
        targets = [KernelCase(op, name, case, scheme) for case in libraries for name in names]
        by_case: dict[Case, list[Explanation]] = {}
        for answer in explain(targets, device):
            if answer.predicted_ms is not None:
                by_case.setdefault(answer.target.case, []).append(answer)
        cases = tuple(
            Standing(case, min(own, key=lambda answer: answer.predicted_ms or 0.0), libraries[case])
            for case, own in by_case.items()
        )
        if cases:
            spec = registry.get_op(op)
            cost = spec.cost_of(spec.make_inputs(cases[0].case, scheme, torch.device("meta"), 0))
            kind = kind_of(op, cost)
            error = public.unfitted(public.read().query("kind == @kind"))
            found.append(Expected(bar, cases, band(kind), error))
    return found


def page(device: Device, found: Sequence[Expected]) -> str:
    """The tables as Markdown."""
    every = [(bar, standing) for bar in found for standing in bar.cases]
    every.sort(key=lambda pair: pair[1].ratio)
    widest = [
        {
            "bar": bar.bar.id.removeprefix("bar:"),
            "case": standing.case.id,
            "kernel": standing.best.target.kernel,
            "predicted_us": f"{(standing.best.predicted_ms or 0.0) * 1e3:.1f}",
            "library_us": f"{(standing.library.seconds or 0.0) * 1e6:.1f}",
            "ratio": f"{standing.ratio:.2f}",
            "its largest part": standing.cause,
        }
        for bar, standing in every[:WIDEST]
    ]
    return "\n".join(
        [
            f"# Where the kernels would stand on an {device.full_name}",
            "",
            "Nothing here was measured. Predicted: `rooflab explain`, uncalibrated. Library: published times of vLLM "
            "0.24.0's kernels (`tables.json`), interpolated where a shape is between two. `python "
            "results/standing.py` writes this page. Of a prediction, the least work and the rates that cards "
            "sustain are parts that no kernel can change; the last column has the largest of the others.",
            "",
            *_table([bar.row() for bar in found]),
            "",
            f"## The {WIDEST} widest expected misses",
            "",
            *_table(widest),
            "",
        ]
    )


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)] if rows else []
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Predicted times beside published ones, for the bars of the suite.")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--bar", action="append", help="only this bar, as gemm.bf16_large")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = get_device(arguments.gpu)
    bars = [bar for bar in AGAINST_LIBRARY if not arguments.bar or bar.id.removeprefix("bar:") in arguments.bar]
    text = page(device, expected(device, bars))
    print(text)
    if arguments.out:
        write_whole(arguments.out, text)


if __name__ == "__main__":
    main()
