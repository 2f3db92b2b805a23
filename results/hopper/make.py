"""How the kernels compare with others on a Hopper GPU: one page and its figures, made of what is known.

    python results/hopper/make.py --gpu h100 --out results/hopper/README.md

Measured ratios come from the targets' records in `results/<gpu>*/`; without records, a published time is divided by a
predicted time.  A prediction is a range: from the tenth to the ninetieth percentile of published over predicted time of
public kernels of its kind, but never faster than the best published rate for the card, the op and its dtype.  If the
range contains 1, the page says `cannot tell`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from pathlib import Path
from statistics import geometric_mean

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from targets.gemm import SKINNY_RUNGS
from targets.judge import AGAINST_LIBRARY
from targets.measures import latencies, launched
from targets.target import AcceptanceTarget

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import read_all
from rooflab.bench.predict import public
from rooflab.bench.predict.explain import Explanation, explain
from rooflab.bench.predict.model import LEAST_WORK, SUSTAINED
from rooflab.bench.predict.public import band, kind_of
from rooflab.bench.report.pictures.canvas import FIGURE_WIDTH_IN
from rooflab.bench.suite.passed import CODE_FIELD
from rooflab.bench.suite.state import folder_of
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.model import Cost, bound
from rooflab.roofline.plot import with_own_settings
from rooflab.roofline.published import COSTS, Time, committed, times_of

RESULTS = Path(__file__).resolve().parents[1]
MEASURED, PREDICTED = "measured", "published over predicted"
FASTER, SLOWER, CANNOT_TELL = "faster", "slower", "cannot tell"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
COLOURS = {FASTER: BLUE, SLOWER: ORANGE, CANNOT_TELL: GREY}
HEADS = "H=16,H_kv=16,D=128,causal=true"
PAGES = "H=32,H_kv=8,D=128,block_size=16,ragged=false"
SLOWEST = 10
"""The number of cases that the page lists with their largest cost."""
OTHER_PAGES = (
    "## Other predictions for an H100",
    "",
    "- [rows.md](rows.md): norms, activations and softmax beside a copy of as many bytes.",
    "- [decode_layer.md](decode_layer.md): what one decoder layer launches beside its GEMMs and attention.",
    "- [levers.md](levers.md): two kernels that a GPU has to judge, with bytes counted in the emulator.",
    "",
    "Their scripts made one page each; `git show 499d7bf7:results/NAME.py` shows them (`against_copy`, `decode_layer`,",
    "`levers`). This page is made again in two minutes:",
    "",
    "```sh",
    "python results/hopper/make.py --gpu h100 --out results/hopper/README.md",
    "```",
)


@dataclass(frozen=True)
class RivalRatio:
    """One case of a target: our kernel beside a rival, both measured or both estimated."""

    target: str
    case: str
    kernel: str
    rival: str
    ratio: float
    """The rival's time divided by ours: above 1 our kernel is faster."""
    basis: str
    ends: tuple[float, float] | None = None
    """The least and the largest possible ratio; None if the ratio was measured."""
    error: str = ""
    """The median error of predictions of this kind."""
    cause: str = ""
    """The largest part of a prediction that another kernel could avoid."""


def range_of(found: Sequence[RivalRatio]) -> tuple[float, float]:
    """The least and the largest geometric mean of ratios."""
    every = [one.ends or (one.ratio, one.ratio) for one in found]
    return geometric_mean(least for least, _ in every), geometric_mean(most for _, most in every)


def verdict(least: float, most: float) -> str:
    """Says whether our kernels are faster, at both ends of a range of ratios."""
    return FASTER if least >= 1 else SLOWER if most < 1 else CANNOT_TELL


@dataclass(frozen=True)
class Curve:
    """A family of cases that differ in one size, with the rate that the figure shows."""

    title: str
    axis: str
    unit: str
    op: str
    kernel: str
    cases: tuple[tuple[int, str], ...]

    @property
    def works(self) -> dict[int, tuple[Case, Cost]]:
        """By size, the checked case and its least work."""
        spec, scheme = registry.get_op(self.op), get_scheme("bf16")
        cases = {size: spec.check_case(Case.parse(text)) for size, text in self.cases}
        meta = torch.device("meta")
        return {size: (case, spec.cost_of(spec.make_inputs(case, scheme, meta, 0))) for size, case in cases.items()}

    def rate(self, cost: Cost, seconds: float) -> float:
        """The rate in TFLOP/s, or in GB/s of the least bytes."""
        return cost.flops / seconds / 1e12 if self.unit == "TFLOP/s" else cost.bytes / seconds / 1e9


@dataclass(frozen=True)
class Rates:
    """All known rates of a curve, by size, in the curve's unit."""

    roof: float
    predicted: dict[int, tuple[float, float]]
    """The least and the largest predicted rate, at most the best published rate."""
    published: dict[int, float]
    """The published rate of the fastest library."""
    measured: dict[str, dict[int, float]]
    """The measured rates by kernel."""


CURVES = (
    Curve("causal prefill, d128, 16k tokens", "sequence length", "TFLOP/s", "flash_attention", "ping_pong",
          tuple((t, f"B={16384 // t},T={t},S={t},{HEADS}") for t in (1024, 2048, 4096, 8192, 16384))),
    Curve("paged decode, 64 sequences, GQA 32/8", "keys of a sequence", "GB/s", "paged_attention", "split_kv",
          tuple((c, f"B=64,context={c},{PAGES}") for c in (1024, 2048, 4096, 8192))),
    Curve("product, 8192 x 8192 x K", "K", "TFLOP/s", "gemm", "cooperative",
          tuple((k, f"M=8192,N=8192,K={k},layout=NT,bias=false") for k in (512, 1024, 2048, 4096, 8192, 16384))),
)  # fmt: skip


@cache
def best_flops_per_s(op: str, scheme: str, gpu: str, D: int | None) -> float:
    """The best published rate in FLOP/s; `inf` if none is published.  D: the head_dim of attention."""
    rates = [0.0]
    for table in committed():
        if (table.op, table.scheme, table.gpu) == (op, scheme, gpu):
            names = (*table.exact, *table.axes)
            shapes = ((dict(zip(names, shape, strict=True)), seconds) for shape, seconds in table.times.items())
            rates += [COSTS[op](scheme, shape).flops / s for shape, s in shapes if D is None or shape.get("D") == D]
    return max(rates) or inf


def least_s(op: str, scheme: str, case: Case, device: Device) -> float:
    """The least time of a case in seconds: at the best published rate, and at the data sheet's rates."""
    spec = registry.get_op(op)
    cost = spec.cost_of(spec.make_inputs(case, get_scheme(scheme), torch.device("meta"), 0))
    D = int(case["D"]) if "D" in case else None
    return max(cost.flops / best_flops_per_s(op, scheme, device.name, D), bound(cost, device.ceilings()).seconds)


def records_on(gpu: str, root: Path = RESULTS) -> list[Record]:
    """All committed records of runs on cards of this name."""
    return [record for folder in sorted(root.glob(f"{gpu}*")) if folder.is_dir() for record in read_all(folder)]


def contact(records: Iterable[Record]) -> str:
    """Says in one sentence which kernels have run on a GPU; README has this sentence."""
    first: dict[str, Record] = {}
    for record in sorted(records, key=lambda one: one.timestamp):
        if record.kind == "check" and record.checked_by == "gpu" and CODE_FIELD in record.environment:
            first.setdefault(f"{record.op}/{record.kernel}", record)
    if not first:
        return "No kernel of Rooflab has run on a GPU yet."
    right = sum(record.status == "OK" for record in first.values())
    cards = ", ".join(sorted({str((record.environment.get("gpu") or {}).get("name")) for record in first.values()}))
    return f"Of {len(first)} kernels {right} were right when they first ran on a GPU ({cards})."


def measured(target: AcceptanceTarget, gpu: str, root: Path = RESULTS) -> list[RivalRatio]:
    """The newest measured ratios of a target: the kernel that a launcher takes, over any project's fastest rival."""
    runs = sorted(path for path in root.glob(f"{gpu}*/**/{folder_of(Path(), target.id).name}") if path.is_dir())
    records = read_all(runs[-1]) if runs else []
    times, roles = latencies(records), {str(record.kernel): record.role for record in records}
    found: list[RivalRatio] = []
    for text in target.arguments["cases"]:
        case = registry.get_op(target.arguments["op"]).check_case(Case.parse(text))
        own = launched(target.arguments["op"], records, [case], target.arguments["own"])
        if own is not None:
            rivals = {n: ms[case.id] for n, ms in times.items() if roles[n] in ("library", "peer") and case.id in ms}
            rival = min(rivals, key=rivals.__getitem__)
            ratio = rivals[rival] / times[own.kernel][case.id]
            found.append(RivalRatio(_name(target), case.id, own.kernel, rival, ratio, MEASURED))
    return found


def predicted(target: AcceptanceTarget, device: Device) -> list[RivalRatio]:
    """The predicted ratios of a target, by its best rung, on the cases for which vLLM's time is published."""
    op, scheme = target.arguments["op"], get_scheme(target.arguments.get("scheme", "bf16"))
    spec = registry.get_op(op)
    libraries: dict[Case, Time] = {}
    for text in target.arguments["cases"]:
        case = spec.check_case(Case.parse(text))
        times = [time for time in times_of(op, scheme.name, case, device.name) if time.table.framework == "vllm"]
        if times:
            libraries[case] = min(times, key=lambda time: time.seconds or 0.0)
    rungs = target.arguments.get("rungs") or (SKINNY_RUNGS if "slow_share" in target.arguments else ())
    names = rungs or [kernel.name for kernel in registry.kernels(op).values() if kernel.role == "optimized"]
    best: dict[Case, Explanation] = {}
    for answer in explain([KernelCase(op, name, case, scheme) for case in libraries for name in names], device):
        case = answer.target.case
        if answer.predicted_ms and (case not in best or answer.predicted_ms < (best[case].predicted_ms or inf)):
            best[case] = answer
    found: list[RivalRatio] = []
    for case, answer in best.items():
        seconds, how = libraries[case].seconds or nan, libraries[case].how
        kind = kind_of(op, spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0)))
        error = public.unfitted(public.read().query("kind == @kind")).median
        ratio, most = seconds * 1e3 / (answer.predicted_ms or nan), seconds / least_s(op, scheme.name, case, device)
        slow, fast = (min(ratio / end, most) for end in reversed(band(kind)))
        part = max((one for one in answer.parts if one.name not in (LEAST_WORK, SUSTAINED)), key=lambda one: one.ms)
        cause = f"{part.name}, {part.ms * 1e3:.1f} us: {part.why}"
        told = (answer.target.kernel, f"vllm {how}", ratio, PREDICTED, (slow, fast), f"{error:.0%}", cause)
        found.append(RivalRatio(_name(target), case.id, *told))
    return found


def rival_ratios(device: Device, gpu: str) -> list[RivalRatio]:
    """Every target against the library: measured ratios, or else predicted times beside published times."""
    return [
        ratio
        for target in AGAINST_LIBRARY
        if "geomean" in target.arguments
        for ratio in measured(target, gpu) or predicted(target, device)
    ]


def _name(target: AcceptanceTarget) -> str:
    return target.id.removeprefix("bar:")


def ratios_figure(found: Sequence[RivalRatio]) -> Figure:
    """Draws one row per target: a dot for each measured case, a line for the range of each predicted case."""
    names = list(dict.fromkeys(one.target for one in found))
    figure = Figure(figsize=(FIGURE_WIDTH_IN, 1.0 + 0.55 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        own = sorted((one for one in found if one.target == name), key=lambda one: one.ratio)
        for nth, one in enumerate(own):
            ends = range_of([one])
            colour = COLOURS[verdict(*ends)]
            if one.basis == MEASURED:
                axes.plot(one.ratio, -place, "o", markersize=6, alpha=0.8, color=colour)
            else:
                axes.hlines(-place - 0.35 + 0.7 * nth / len(own), *ends, color=colour, linewidth=1.2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set_xscale("log")
    ticks = [0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    said = "dots: measured; lines: published over predicted;\na line a case, grey: cannot tell"
    axes.set_xlabel(f"rival's time / ours (above 1: ours is faster)\n{said}")
    axes.grid(axis="x", alpha=0.3)
    return figure


def rates_of(curve: Curve, device: Device, records: Sequence[Record]) -> Rates:
    """The predicted, published and measured rates of a curve's cases."""
    works, scheme, sheet = curve.works, get_scheme("bf16"), device.ceilings()
    roof = sheet.tensor_flops_per_s["bf16"] / 1e12 if curve.unit == "TFLOP/s" else sheet.hbm_bytes_per_s / 1e9
    told = explain([KernelCase(curve.op, curve.kernel, case, scheme) for case, _ in works.values()], device)
    ranges, published = {}, {}
    for (size, (case, cost)), one in zip(works.items(), told, strict=True):
        if one.predicted_ms:
            shortest = least_s(curve.op, scheme.name, case, device)
            ends = (max(one.predicted_ms * 1e-3 * end, shortest) for end in reversed(band(kind_of(curve.op, cost))))
            least, most = (curve.rate(cost, seconds) for seconds in ends)
            ranges[size] = least, most
        if times := [one.seconds for one in times_of(curve.op, "bf16", case, device.name) if one.seconds]:
            published[size] = curve.rate(cost, min(times))
    timed = {
        kernel: {size: curve.rate(cost, ms[case.id] * 1e-3) for size, (case, cost) in works.items() if case.id in ms}
        for kernel, ms in latencies([record for record in records if record.op == curve.op]).items()
    }
    return Rates(roof, ranges, published, {kernel: by_size for kernel, by_size in timed.items() if by_size})


def curves_figure(rates: Sequence[Rates]) -> Figure:
    """Draws one panel per curve: the predicted range, the published library, measured points, the data sheet's roof."""
    figure = Figure(figsize=(FIGURE_WIDTH_IN, 2.9 * len(CURVES)), layout="constrained")
    for axes, curve, known in zip(figure.subplots(len(CURVES), 1), CURVES, rates, strict=True):
        sizes = [size for size, _ in curve.cases]
        if known.predicted:
            least, most = zip(*known.predicted.values(), strict=True)
            label = f"{curve.kernel}, predicted"
            axes.fill_between([*known.predicted], least, most, color=BLUE, alpha=0.2, linewidth=0, label=label)
        axes.plot(*_line(known.published), "s--", color=GREY, markerfacecolor="none", label="vLLM's kernels, published")
        for kernel, by_size in known.measured.items():
            axes.plot(*_line(by_size), "o-", label=f"{kernel}, measured")
        axes.axhline(known.roof, color="black", linewidth=0.8)
        axes.annotate("data sheet", (sizes[0], known.roof), textcoords="offset points", xytext=(0, 3), fontsize=9)
        limits = (0, 1.12 * known.roof)
        axes.set(title=curve.title, xlabel=curve.axis, ylabel=curve.unit, xscale="log", ylim=limits)
        axes.set_xticks(sizes, [f"{size // 1024}k" if size >= 1024 else str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="lower right")
    return figure


def _line(by_size: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return [*by_size], [*by_size.values()]


def predictions_figure(device: Device, records: Sequence[Record]) -> Figure | None:
    """Draws measured over predicted time of our own kernels; None if nothing was measured."""
    timed = [r for r in records if r.role == "optimized" and r.status == "OK" and r.latency_median_ms and r.case_id]
    targets = {
        KernelCase(str(r.op), str(r.kernel), Case(**r.case), get_scheme(str(r.scheme))): float(
            r.latency_median_ms or nan
        )
        for r in timed
        if r.basis == "measured" and str(r.kernel) in registry.kernels(str(r.op))
    }
    found = [(one.predicted_ms, targets[one.target]) for one in explain([*targets], device) if one.predicted_ms]
    if not found:
        return None
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*found, strict=True), "o", color=BLUE, alpha=0.7)
    ends = [min(min(pair) for pair in found), max(max(pair) for pair in found)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms")
    return figure


def page(device: Device, found: Sequence[RivalRatio], sentence: str, figures: Sequence[str]) -> str:
    """The page as Markdown."""
    lines = [f"# On an {device.full_name}", "", sentence, ""]
    if {one.basis for one in found} == {PREDICTED}:
        lines += [
            "Nothing on this page was measured by Rooflab. Theirs: published times of vLLM 0.24.0's kernels. Ours:",
            "predicted by `rooflab explain`, uncalibrated, as a range: eight of ten public kernels of the kind lie",
            "between its ends. A range ends at the best rate that anybody has published for the card, the op, its",
            "dtype and head_dim: what the predictor says beyond it is its error. The median error on public kernels",
            "stands beside each target. Under tensor load the predictor takes a clock of 1.6 GHz, to which published",
            "runs fall at their power limit (`bench/predict/chip.py`).",
            "",
        ]
    lines += [f"![{name}]({name}.svg)" for name in figures] + [""]
    rows = []
    for target in AGAINST_LIBRARY:
        own = [one for one in found if one.target == _name(target)]
        if own:
            worst, (least, most) = min(own, key=lambda one: one.ratio), range_of(own)
            mean = f"{least:.2f}" if own[0].basis == MEASURED else f"{least:.2f} to {most:.2f}"
            cases, needed = f"{len(own)} of {len(target.arguments['cases'])}", f"{target.arguments['geomean']:.2f}"
            slowest = f"{worst.kernel} at {worst.case}"
            told = (own[0].basis, own[0].error or "none", cases, needed, mean, verdict(least, most), slowest)
            rows.append((_name(target), *told))
    columns = ("target", "basis", "median error:", "cases:", "needed:", "geomean:", "ours is", "its slowest")
    lines += [*markdown_table(columns, rows), "", "## What we lose", ""]
    losers = sorted((one for one in found if verdict(*range_of([one])) == SLOWER), key=lambda one: one.ratio)
    lines += [
        f"- {one.target}: {one.kernel} at {one.case}: {one.ratio:.2f} of {one.rival} ({one.basis})" for one in losers
    ] or ["Nothing that this basis can tell."]
    lines += ["", f"## The {SLOWEST} slowest beside their rivals", ""]
    lines += ["The last column has the largest part of the prediction that another kernel could avoid.", ""]
    slowest_first = sorted(found, key=lambda one: one.ratio)[:SLOWEST]
    cells = [(one.target, one.case, one.kernel, f"{one.ratio:.2f}", one.cause) for one in slowest_first]
    lines += markdown_table(("target", "case", "kernel", "ratio:", "its largest part"), cells)
    return "\n".join([*lines, "", *OTHER_PAGES]) + "\n"


@with_own_settings
def main() -> None:
    """Writes the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device, records = get_device(options.gpu), records_on(options.gpu)
    found = rival_ratios(device, options.gpu)
    made = {
        "ratios": ratios_figure(found),
        "curves": curves_figure([rates_of(curve, device, records) for curve in CURVES]),
        "measured": predictions_figure(device, records),
    }
    drawn = {name: figure for name, figure in made.items() if figure is not None}
    for name, figure in drawn.items():
        FigureCanvasAgg(figure)
        figure.savefig(options.out.parent / f"{name}.svg", metadata={"Date": None})
    write_whole(options.out, page(device, found, contact(records), [*drawn]))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
