"""Makes roofline figures and ladder rows from records; no number is written by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.decode import decoded
from rooflab.bench.core import Record
from rooflab.bench.report.sources import NOT_WRONG, Located, Source, benches_of, choose, grouped, latency_ms, machine_of
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import get_op, kernels, ops
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme
from rooflab.roofline.device import Device, identify
from rooflab.roofline.model import Ceilings, Cost, bound
from rooflab.roofline.plot import roofline_files
from rooflab.roofline.points import Point
from rooflab.roofline.published import Table, times_of

META = torch.device("meta")


NO_BYTES = "its cost has no bytes, and so it has no intensity"


def placed(
    records: Iterable[Record], roofs: Sequence[Ceilings], device: Device | None = None
) -> tuple[list[Point], list[str]]:
    """The points of the records under the roofs, and the reason why each other record of a right kernel has no point.

    A kernel that failed its check, was not timed or has an invalid reading has no point.  With `device`, the roofs are
    that device's.  A record then gives a bound, and a time only if it is OK and was taken on this device.
    """
    points, unplaced = [], []
    for record in records:
        latency, bound_s = record.latency_median_ms, (record.bound_ms or 0.0) / 1e3
        if record.kind != "bench" or record.status not in NOT_WRONG or not (latency or device):
            continue
        cost, why = _priced(record, roofs)
        flops, least = record.flops or 0.0, record.least_bytes
        if device and cost:
            flops, least, bound_s = cost.flops, cost.bytes, bound(cost, roofs[0]).seconds
            gpu = (record.environment.get("gpu") or {}) if record.device != "cpu" else {}
            latency = latency_ms(record) if identify(str(gpu.get("name", ""))) == device else None
        elif cost is None and "imported" in record.environment and record.op not in ops() and not device:
            why = ""  # the record has its own bound, which needs no cost
        moved = record.traffic_bytes or least
        if not why and not moved:
            why = NO_BYTES if least == 0 else "its record says neither traffic nor least bytes"
        if not why and not bound_s > 0:
            why = "its record holds no bound"
        if why or not moved:
            unplaced.append(f"{record.op}/{record.kernel}: {why}")
            continue
        op, kernel = str(record.op), str(record.kernel)
        registered = kernels(op).get(kernel) if op in ops() and record.scheme else None
        point = Point(
            label=kernel,
            op=op,
            case=" ".join(part for part in (record.case_id, record.scheme) if part),
            role=record.role or (registered.role if registered else "benchmark"),
            dtype=next(iter(cost.tensor_flops), None) if cost else None,
            flops=flops,
            traffic_bytes=moved,
            traffic_basis=record.traffic_basis or "modelled",
            bound_s=bound_s,
            seconds=latency and latency / 1e3,
            noisy=record.status == "NOISY" or bool((record.ceilings or {}).get("noise")),
        )
        points.append(point)
    return points, list(dict.fromkeys(unplaced))


COST, TENSOR = "cost_", "cost_tensor_flops_"
"""The prefixes of metrics that hold the cost of another repository's benchmark, whose op is not known here."""


def cost_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """The fields of a `Cost`, as metrics of a record."""
    tensor = {f"{TENSOR}{dtype}": float(flops) for dtype, flops in values["tensor_flops"].items()}
    return {f"{COST}{name}": float(value) for name, value in values.items() if name != "tensor_flops"} | tensor


def cost_of(record: Record) -> Cost | None:
    """The cost in the record's metrics; else its op's cost for its case; else the FLOPs and bytes of an imported
    record.  None if the cost is unknown.  Raises `ValueError` on a case that the op does not have."""
    values: dict[str, Any] = {item.name: record.metrics.get(f"{COST}{item.name}", 0) for item in fields(Cost)}
    if any(values.values()):
        tensor = {name.removeprefix(TENSOR): v for name, v in record.metrics.items() if name.startswith(TENSOR)}
        return Cost(**values | {"tensor_flops": tensor})
    named = None
    if "imported" in record.environment and record.scheme and record.flops is not None and record.least_bytes:
        named = Cost(record.least_bytes, 0.0, {record.scheme: record.flops} if record.flops else {})
    if record.op not in ops() or record.scheme is None:
        return named
    spec = get_op(record.op)
    try:
        case = spec.check_case(Case(**record.case))
    except ValueError:
        if named:
            return named
        raise
    return spec.cost_of(spec.make_inputs(case, get_scheme(record.scheme), META, 0))


def ceilings_of(records: Iterable[Record]) -> list[Ceilings]:
    """The ceilings in the records; of each kind the last."""
    newest: dict[str, Ceilings] = {}
    for record in records:
        if record.ceilings:
            ceilings = decoded(Ceilings, record.ceilings)
            newest[ceilings.kind] = newest.get(ceilings.kind, ceilings) if ceilings.noise else ceilings
    return list(newest.values())


def bounds_on(device: Device, suite: str, scheme: str, only: Sequence[str] = ()) -> tuple[list[Point], list[Ceilings]]:
    """The points of every kernel that takes one case of each op, on a device that is not present: bounds without times.
    Points of times that others published for these cases are added.

    The case is the largest of the suite by FLOPs and bytes, because large cases are the usual reason to buy a device.
    """
    ceilings = device.ceilings()
    points = []
    for name, spec in ops().items():
        if only and name not in only:
            continue
        # An op of weights in int8 has no bf16 scheme.
        dtypes = scheme if scheme in spec.schemes else spec.schemes[0]
        case = largest_case(spec, spec.get_cases(suite), get_scheme(dtypes))
        inputs = spec.make_inputs(case, get_scheme(dtypes), META, 0)
        cost = spec.cost_of(inputs)
        if not only and not cost.tensor_flops.keys() <= ceilings.tensor_flops_per_s.keys():
            continue
        # Published times take this place too, because the traffic of their kernels is not known.
        least = Point(
            label="",
            op=name,
            case=f"{case.id} {dtypes}",
            role="peer",
            dtype=next(iter(cost.tensor_flops), None),
            flops=cost.flops,
            traffic_bytes=cost.bytes,
            traffic_basis="modelled",
            bound_s=bound(cost, ceilings).seconds,
            seconds=None,
        )
        for kernel in kernels(name).values():
            major, minor = device.compute_capability
            if "cuda" not in kernel.devices or (kernel.min_sm or 0) > 10 * major + minor:
                continue
            if kernel.why_not_args(inputs, spec) is not None:
                continue
            traffic = kernel.traffic_of(inputs, "cuda")
            moved = replace(least, traffic_bytes=traffic.bytes, traffic_basis=traffic.basis) if traffic else least
            points.append(replace(moved, label=kernel.name, role=kernel.role))
        for time in times_of(name, dtypes, case, device.name):
            points.append(replace(least, label=_label(time.table), seconds=time.seconds, published=True))
    return points, [ceilings]


def placed_on(records: Iterable[Record], device: Device) -> tuple[list[Point], list[str]]:
    """The points of the newest reading of each kernel and case on a device.  An emulated call has counted bytes."""
    calls = [
        replace(record, kind="bench") if record.checked_by == "emulator" and record.traffic_bytes else record
        for record in records
    ]
    newest = newest_of(record for record in calls if record.kind == "bench" and record.status in NOT_WRONG)
    points, unplaced = placed(newest, [device.ceilings()], device)
    return list({(point.work, point.label): point for point in points}.values()), unplaced


def _priced(record: Record, roofs: Sequence[Ceilings]) -> tuple[Cost | None, str]:
    """The record's cost.  If the cost is unknown or has no place under the roofs: None, and the reason."""
    try:
        cost = cost_of(record)
    except ValueError as error:
        return None, str(error)
    if cost is None and record.op in ops():
        return None, "the record names no scheme"
    if cost is None:
        named = {"FLOPs": record.flops, "bytes": record.least_bytes, "scheme": record.scheme}
        lacking = " and no ".join(name for name, value in named.items() if value is None)
        why = "its op is not registered here (--kernel FILE registers it)"
        return None, f"{why}, and it names no {lacking}" if lacking and "imported" in record.environment else why
    for roof in roofs:
        if lacks := ", ".join(cost.tensor_flops.keys() - roof.tensor_flops_per_s.keys()):
            return None, f"{roof.device} has no {roof.kind} matrix rate for {lacks}"
    return cost, ""


def _label(table: Table) -> str:
    """The names of a library and its kernel in short: `vllm flash_attn_fa3`."""
    kernel = re.sub("ScaledMM|LinearKernel$|Kernel$", "", table.kernel.rpartition(".")[2])
    return f"{table.framework} {kernel.removeprefix(f'{table.framework}_')}"


@dataclass(frozen=True)
class Drawing:
    """The content of a figure that is not yet drawn."""

    points: list[Point]
    ceilings: list[Ceilings]
    name: str
    """The name of the device, or of the machine if another machine has the same device."""
    machine: str = ""
    """The key of the machine, if the figure shows a single machine."""
    unplaced: list[str] = field(default_factory=list)
    """The kernels without a point, each with the reason."""

    def files(self, fixed_axes: bool = False) -> dict[str, bytes]:
        """By suffix, the contents of the figure's SVG and PNG."""
        return roofline_files(self.points, self.ceilings, f"{self.name} roofline", fixed_axes)


def draw(drawing: Drawing, out: Path, fixed_axes: bool = False) -> list[Path]:
    """Draws a figure and returns the paths.  If `out` is a folder, writes an SVG and a PNG to it; if `out` ends with
    one of the two suffixes, writes that file."""
    name = re.sub("[^a-z0-9]+", "-", drawing.name.lower()).strip("-")
    files = drawing.files(fixed_axes)
    if (suffix := out.suffix.removeprefix(".")) in files:
        return [write_whole(out, files[suffix])]
    return [write_whole(out / f"roofline-{name}.{suffix}", content) for suffix, content in files.items()]


def largest_case(spec: OpSpec, cases: Sequence[Case], scheme: Scheme, most_flops: float = float("inf")) -> Case:
    """The case with the most FLOPs, then bytes.  Only cases with at most `most_flops` count; there must be one."""

    def work(case: Case) -> tuple[float, float]:
        cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
        return cost.flops, cost.bytes

    return max((case for case in cases if work(case)[0] <= most_flops), key=work)


def largest_cases(records: Sequence[Record]) -> list[Record]:
    """For each op and scheme, the records of the case with most FLOPs, then bytes.  A figure has no room for more."""

    def size(record: Record) -> tuple[float, float, str]:
        return record.flops or 0.0, record.least_bytes or 0.0, record.case_id or ""

    benches = [record for record in records if record.kind == "bench"]
    groups = grouped(benches, lambda record: (record.op, record.scheme))
    largest = {key: max(group, key=size).case_id for key, group in groups.items()}
    return [record for record in benches if record.case_id == largest[record.op, record.scheme]]


def newest_of(records: Iterable[Record]) -> list[Record]:
    """The newest reading of each machine, kernel and case, by `sources.choose`."""
    ordered = sorted(records, key=lambda record: record.timestamp)
    located = [Located(record, Source("", 0, line, record.run_id)) for line, record in enumerate(ordered)]
    return [chosen.record for chosen in choose(benches_of(located))]


def drawing_of(machine: str, records: Sequence[Record], ceilings: Iterable[Ceilings]) -> Drawing:
    """The figure of a machine's records.  In its ceilings the driver's name of the device replaces the data sheet's
    shorter name."""
    roofs, gpu = list(ceilings), records[-1].environment.get("gpu") if records[-1].device != "cpu" else None
    name = str((gpu or {}).get("name") or roofs[-1].device)
    roofs = [replace(roof, device=name) for roof in roofs]
    points, unplaced = placed(records, roofs)
    return Drawing(points, roofs, name, machine, unplaced)


def drawings(
    records: Iterable[Record], all_cases: bool = False, runs: Sequence[str] = (), across: bool = False
) -> list[Drawing]:
    """One figure for each machine with a point: of each op's largest case, or of all.  `across`: one for all machines.

    A figure shows the newest reading of each kernel and case, or the readings of `runs`.  Each of `runs` is a part of a
    run's id; the case shows it.  A CPU with another number of threads is another machine: its ceilings differ.
    """
    roofed = (record for record in sorted(records, key=lambda record: record.timestamp) if record.ceilings)
    chosen = (record for record in roofed if not runs or any(run in record.run_id for run in runs))
    drawn: list[Drawing] = []
    for machine, whole in grouped(chosen, machine_of).items():
        group = whole if all_cases else largest_cases(whole)
        parts = grouped(group, lambda record: f", run {record.run_id[-8:]}" if runs else "")
        made = [(drawing_of(machine, newest_of(part), ceilings_of(group)), run) for run, part in parts.items()]
        points = [replace(point, case=point.case + run) for drawing, run in made for point in drawing.points]
        unplaced = list(dict.fromkeys(why for drawing, _ in made for why in drawing.unplaced))
        drawn += [replace(made[-1][0], points=points, unplaced=unplaced)] if points else []
    if across and len(drawn) > 1:
        points = [replace(point, device=drawing.machine) for drawing in drawn for point in drawing.points]
        ceilings = [replace(roof, device=drawing.machine) for drawing in drawn for roof in drawing.ceilings]
        return [Drawing(points, ceilings, f"{len(drawn)} machines")]
    names = Counter(drawing.name for drawing in drawn)
    return [drawing if names[drawing.name] == 1 else replace(drawing, name=drawing.machine) for drawing in drawn]


def why_nothing(records: Sequence[Record]) -> str:
    """The reason why no figure can be drawn of these records."""
    if any("imported" in record.environment and not record.ceilings for record in records):
        return (
            "an imported record names no ceilings (--gpu names the GPU whose ceilings are drawn; the record's time is "
            "drawn too if `import --column gpu==NAME` named the same GPU)"
        )
    unplaced = placed(records, ceilings_of(records))[1]
    return "no bench record with a time and a bound among them" + (f" ({unplaced[0]})" if unplaced else "")


def draw_records(records: Sequence[Record], folder: Path) -> list[Path]:
    """Makes and draws the `drawings` of the records in `folder`; returns the paths."""
    return [path for drawing in drawings(records) for path in draw(drawing, folder)]


def bench_row(record: Record) -> dict[str, Any]:
    """A record as a row of a printed table."""
    latency, bound_ms = record.latency_median_ms, record.bound_ms
    return {
        "op": record.op,
        "kernel": record.kernel,
        "role": record.role,
        "case": record.case_id,
        "scheme": record.scheme,
        "status": record.status,
        "latency_ms": latency,
        "p20_ms": record.latency_p20_ms,
        "p80_ms": record.latency_p80_ms,
        "bound_ms": bound_ms,
        "of_bound": record.bound_fraction,
        "limiter": record.limiter,
        "gflops_per_s": None if record.flops_per_s is None else record.flops_per_s / 1e9,
        "gbytes_per_s": None if record.bytes_per_s is None else record.bytes_per_s / 1e9,
        "reason": record.reason,
    }
