"""Where the kernels stand on a Hopper GPU: one page and its figures, made of what is known.

    python results/hopper.py --gpu h100 --out results/hopper.md

Measured ratios come from the bars' records in `results/<gpu>*/`; where there is none, a predicted time stands beside a
published one, drawn hollow and named so.  The two are never mixed in one ratio.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import geometric_mean

import torch
from bars.bar import Bar
from bars.judge import AGAINST_LIBRARY
from bars.measures import latencies, launched
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from standing import expected

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import read_all
from rooflab.bench.predict.explain import explain
from rooflab.bench.report.pictures.figures import WIDTH_IN
from rooflab.bench.suite.passed import CODE
from rooflab.bench.suite.state import folder_of
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.plot import own_settings
from rooflab.roofline.published import times_of

HERE = Path(__file__).resolve().parent
MEASURED, PREDICTED = "measured", "published over predicted"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"
HEADS = "H=16,H_kv=16,D=128,causal=true"
PAGES = "H=32,H_kv=8,D=128,block_size=16,ragged=false"


@dataclass(frozen=True)
class Standing:
    """One case of a bar: our kernel beside a rival, on one basis."""

    bar: str
    case: str
    kernel: str
    rival: str
    ratio: float
    """The rival's time over ours: above 1 ours is faster."""
    basis: str


@dataclass(frozen=True)
class Curve:
    """A family of cases along one size, with the rate that it is about."""

    title: str
    axis: str
    unit: str
    op: str
    kernel: str
    cases: tuple[tuple[int, str], ...]

    def rate(self, case: Case, seconds: float) -> float:
        """TFLOP/s, or GB/s of the least bytes."""
        spec = registry.get_op(self.op)
        cost = spec.cost_of(spec.make_inputs(case, get_scheme("bf16"), torch.device("meta"), 0))
        return cost.flops / seconds / 1e12 if self.unit == "TFLOP/s" else cost.bytes / seconds / 1e9


CURVES = (
    Curve("causal prefill, d128, 16k tokens", "sequence length", "TFLOP/s", "flash_attention", "ping_pong",
          tuple((t, f"B={16384 // t},T={t},S={t},{HEADS}") for t in (1024, 2048, 4096, 8192, 16384))),
    Curve("paged decode, 64 sequences, GQA 32/8", "keys of a sequence", "GB/s", "paged_attention", "split_kv",
          tuple((c, f"B=64,context={c},{PAGES}") for c in (1024, 2048, 4096, 8192))),
    Curve("product, 8192 x 8192 x K", "K", "TFLOP/s", "gemm", "cooperative",
          tuple((k, f"M=8192,N=8192,K={k},layout=NT,bias=false") for k in (512, 1024, 2048, 4096, 8192, 16384))),
)  # fmt: skip


def records_on(gpu: str, root: Path = HERE) -> list[Record]:
    """All committed records of runs on cards of this name."""
    return [record for folder in sorted(root.glob(f"{gpu}*")) if folder.is_dir() for record in read_all(folder)]


def contact(records: Iterable[Record]) -> str:
    """What has run on a GPU, in one sentence; README has it."""
    first: dict[str, Record] = {}
    for record in sorted(records, key=lambda one: one.timestamp):
        if record.kind == "check" and record.checked_by == "gpu" and CODE in record.environment:
            first.setdefault(f"{record.op}/{record.kernel}", record)
    if not first:
        return "No kernel of Rooflab has run on a GPU yet."
    right = sum(record.status == "OK" for record in first.values())
    cards = ", ".join(sorted({str((record.environment.get("gpu") or {}).get("name")) for record in first.values()}))
    return f"Of {len(first)} kernels {right} were right when they first ran on a GPU ({cards})."


def measured(bar: Bar, gpu: str, root: Path = HERE) -> list[Standing]:
    """The newest measured ratios of a bar: the kernel that a launcher takes, over the fastest rival of any project."""
    runs = sorted(path for path in root.glob(f"{gpu}*/**/{folder_of(Path(), bar.id).name}") if path.is_dir())
    records = read_all(runs[-1]) if runs else []
    times, roles = latencies(records), {str(record.kernel): record.role for record in records}
    found: list[Standing] = []
    for text in bar.arguments["cases"]:
        case = registry.get_op(bar.arguments["op"]).check_case(Case.parse(text))
        own = launched(bar.arguments["op"], records, [case], bar.arguments["own"])
        if own is not None:
            rivals = {n: ms[case.id] for n, ms in times.items() if roles[n] in ("library", "peer") and case.id in ms}
            rival = min(rivals, key=rivals.__getitem__)
            ratio = rivals[rival] / times[own.kernel][case.id]
            found.append(Standing(_name(bar), case.id, own.kernel, rival, ratio, MEASURED))
    return found


def standings(device: Device, gpu: str) -> list[Standing]:
    """Every bar against the library: as measured, or else as predicted beside what is published."""
    found: list[Standing] = []
    for bar in (one for one in AGAINST_LIBRARY if "geomean" in one.arguments):
        if own := measured(bar, gpu):
            found += own
            continue
        for one in expected(device, [bar]):
            for case in one.cases:
                rival = f"{case.library.table.framework} {case.library.how}"
                kernel = case.best.target.kernel
                found.append(Standing(_name(bar), case.case.id, kernel, rival, case.ratio, PREDICTED))
    return found


def _name(bar: Bar) -> str:
    return bar.id.removeprefix("bar:")


def ratios_figure(found: Sequence[Standing]) -> Figure:
    """One row a bar, a dot a case; measured ones are filled."""
    names = list(dict.fromkeys(one.bar for one in found))
    figure = Figure(figsize=(WIDTH_IN, 0.8 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    for one in found:
        filled = one.basis == MEASURED
        colour = BLUE if one.ratio >= 1 else ORANGE
        (dot,) = axes.plot(one.ratio, -names.index(one.bar), "o", markersize=6, alpha=0.8, color=colour)
        dot.set_markerfacecolor(colour if filled else "none")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1.0, 1.5, 2.0, 3.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel("rival's time / ours (above 1: ours is faster)\nfilled: measured; hollow: published over predicted")
    axes.grid(axis="x", alpha=0.3)
    return figure


def curves_figure(device: Device, records: Sequence[Record]) -> Figure:
    """Three panels: our kernel, the published library, measured points, and the data sheet's roof."""
    figure = Figure(figsize=(WIDTH_IN, 2.9 * len(CURVES)), layout="constrained")
    for axes, curve in zip(figure.subplots(len(CURVES), 1), CURVES, strict=True):
        spec, scheme = registry.get_op(curve.op), get_scheme("bf16")
        cases = [(size, spec.check_case(Case.parse(text))) for size, text in curve.cases]
        sizes = [size for size, _ in cases]
        told = explain([KernelCase(curve.op, curve.kernel, case, scheme) for _, case in cases], device)
        ours = [curve.rate(one.target.case, one.predicted_ms * 1e-3) if one.predicted_ms else nan for one in told]
        axes.plot(sizes, ours, "o--", color=BLUE, markerfacecolor="none", label=f"{curve.kernel}, predicted")
        theirs = []
        for _, case in cases:
            times = [one.seconds for one in times_of(curve.op, "bf16", case, device.name) if one.seconds]
            theirs.append(curve.rate(case, min(times)) if times else nan)
        axes.plot(sizes, theirs, "s--", color=GREY, markerfacecolor="none", label="vLLM's kernels, published")
        own = [record for record in records if record.op == curve.op]
        for kernel, by_case in latencies(own).items():
            known = [(size, curve.rate(case, by_case[case.id] * 1e-3)) for size, case in cases if case.id in by_case]
            if known:
                axes.plot(*zip(*known, strict=True), "o-", label=f"{kernel}, measured")
        sheet = device.ceilings()
        roof = sheet.tensor_flops_per_s["bf16"] / 1e12 if curve.unit == "TFLOP/s" else sheet.hbm_bytes_per_s / 1e9
        axes.axhline(roof, color="black", linewidth=0.8)
        axes.annotate("data sheet", (sizes[0], roof), textcoords="offset points", xytext=(0, -12), fontsize=9)
        axes.set(title=curve.title, xlabel=curve.axis, ylabel=curve.unit, xscale="log", ylim=(0, 1.08 * roof))
        axes.set_xticks(sizes, [f"{size // 1024}k" if size >= 1024 else str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, loc="lower right")
    return figure


def predictions_figure(device: Device, records: Sequence[Record]) -> Figure | None:
    """Measured over predicted time of our own kernels; None where nothing was measured."""
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


def page(device: Device, found: Sequence[Standing], sentence: str, figures: Sequence[str]) -> str:
    """The page as Markdown."""
    basis = {one.basis for one in found}
    lines = [f"# On an {device.full_name}", "", sentence, ""]
    if basis == {PREDICTED}:
        lines += [
            "Nothing on this page was measured by Rooflab. Ours: predicted by `rooflab explain`, uncalibrated; on"
        ]
        lines += [
            "public attention kernels it errs by 24 to 43% in the median (`docs/results.md` has the other kinds)."
        ]
        lines += [
            "Theirs: published times of vLLM 0.24.0's kernels. Such a ratio says where to look, not who is faster."
        ]
        lines += [""]
    lines += [f"![{name}](figures/{name}.svg)" for name in figures] + [""]
    rows = []
    for bar in dict.fromkeys(one.bar for one in found):
        own = [one for one in found if one.bar == bar]
        worst = min(own, key=lambda one: one.ratio)
        mean = geometric_mean(one.ratio for one in own)
        slowest = f"{worst.kernel} at {worst.case}"
        rows.append((bar, own[0].basis, len(own), f"{mean:.2f}", slowest, f"{worst.ratio:.2f}"))
    lines += markdown_table(("bar", "basis", "cases:", "geomean:", "slowest beside its rival", "its ratio:"), rows)
    losers = sorted((one for one in found if one.ratio < 1), key=lambda one: one.ratio)
    lines += ["", "## What we lose", ""] + (
        [f"- {one.bar}: {one.kernel} at {one.case}: {one.ratio:.2f} of {one.rival} ({one.basis})" for one in losers]
        or ["Nothing, on this basis."]
    )
    return "\n".join(lines) + "\n"


@own_settings
def main() -> None:
    """Writes the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device, records = get_device(options.gpu), records_on(options.gpu)
    found = standings(device, options.gpu)
    made = {
        f"{options.out.stem}-ratios": ratios_figure(found),
        f"{options.out.stem}-curves": curves_figure(device, records),
        f"{options.out.stem}-predicted": predictions_figure(device, records),
    }
    drawn = {name: figure for name, figure in made.items() if figure is not None}
    for name, figure in drawn.items():
        place = options.out.parent / "figures" / f"{name}.svg"
        place.parent.mkdir(exist_ok=True)
        FigureCanvasAgg(figure)
        figure.savefig(place, metadata={"Date": None})
    write_whole(options.out, page(device, found, contact(records), [*drawn]))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
