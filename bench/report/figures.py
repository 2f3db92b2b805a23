"""Makes roofline figures and table rows from records.  No number is written by hand."""

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
    """Returns the roofline points of the records.  Also returns, for each correct kernel without a point, the reason.

    A kernel has no point if it failed its check, was not timed, or has an invalid time.  With `device`, `roofs` are the
    ceilings of this device.  Each record then gives a bound.  It gives a time only if it is OK and was measured on this
    device."""
    points, unplaced = [], []
    for record in records:
        latency, bound_s = record.latency_median_ms, (record.bound_ms or 0.0) / 1e3
        if record.kind != "bench" or record.status not in NOT_WRONG or not (latency or device):
            continue
        cost, reason = _priced(record, roofs)
        flops, least_bytes = record.flops or 0.0, record.least_bytes
        if device and cost:
            flops, least_bytes, bound_s = cost.flops, cost.bytes, bound(cost, roofs[0]).seconds
            gpu = (record.environment.get("gpu") or {}) if record.device != "cpu" else {}
            latency = latency_ms(record) if identify(str(gpu.get("name", ""))) == device else None
        elif cost is None and "imported" in record.environment and record.op not in ops() and not device:
            reason = ""  # the record has its own bound, which needs no cost
        moved_bytes = record.traffic_bytes or least_bytes
        if not reason and not moved_bytes:
            reason = NO_BYTES if least_bytes == 0 else "its record says neither traffic nor least bytes"
        if not reason and not bound_s > 0:
            reason = "its record holds no bound"
        if reason or not moved_bytes:
            unplaced.append(f"{record.op}/{record.kernel}: {reason}")
            continue
        op, kernel = str(record.op), str(record.kernel)
        registered = kernels(op).get(kernel) if op in ops() and record.scheme else None
        point = Point(
            label=kernel,
            op=op,
            case=" ".join(word for word in (record.case_id, record.scheme) if word),
            role=record.role or (registered.role if registered else "benchmark"),
            dtype=next(iter(cost.tensor_flops), None) if cost else None,
            flops=flops,
            traffic_bytes=moved_bytes,
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
    """Converts the fields of a `Cost` into metrics of a record."""
    tensor = {f"{TENSOR}{dtype}": float(flops) for dtype, flops in values["tensor_flops"].items()}
    return {f"{COST}{name}": float(value) for name, value in values.items() if name != "tensor_flops"} | tensor


def cost_of(record: Record) -> Cost | None:
    """Returns the cost in the record's metrics, or else the cost of the record's op and case.  For other imported
    records, returns a cost with their FLOPs and bytes.  Returns None if the cost is unknown.  Raises `ValueError` on a
    case that the op does not have."""
    values: dict[str, Any] = {item.name: record.metrics.get(f"{COST}{item.name}", 0) for item in fields(Cost)}
    if any(values.values()):
        tensor = {name.removeprefix(TENSOR): v for name, v in record.metrics.items() if name.startswith(TENSOR)}
        return Cost(**values | {"tensor_flops": tensor})
    imported_cost = None
    if "imported" in record.environment and record.scheme and record.flops is not None and record.least_bytes:
        imported_cost = Cost(record.least_bytes, 0.0, {record.scheme: record.flops} if record.flops else {})
    if record.op not in ops() or record.scheme is None:
        return imported_cost
    spec = get_op(record.op)
    try:
        case = spec.check_case(Case(**record.case))
    except ValueError:
        if imported_cost:
            return imported_cost
        raise
    return spec.cost_of(spec.make_inputs(case, get_scheme(record.scheme), META, 0))


def ceilings_of(records: Iterable[Record]) -> list[Ceilings]:
    """Returns the ceilings in the records, one for each kind.  If records differ, the last record counts."""
    newest: dict[str, Ceilings] = {}
    for record in records:
        if record.ceilings:
            ceilings = decoded(Ceilings, record.ceilings)
            newest[ceilings.kind] = newest.get(ceilings.kind, ceilings) if ceilings.noise else ceilings
    return list(newest.values())


def bounds_on(device: Device, suite: str, scheme: str, only: Sequence[str] = ()) -> tuple[list[Point], list[Ceilings]]:
    """Returns roofline points for a device that is not present: one point for each kernel, on one case of each op.
    These points are bounds without times.  Points with times that others published for these cases are added.

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
        minimal = Point(
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
            point = replace(minimal, traffic_bytes=traffic.bytes, traffic_basis=traffic.basis) if traffic else minimal
            points.append(replace(point, label=kernel.name, role=kernel.role))
        for time in times_of(name, dtypes, case, device.name):
            points.append(replace(minimal, label=_label(time.table), seconds=time.seconds, published=True))
    return points, [ceilings]


def placed_on(records: Iterable[Record], device: Device) -> tuple[list[Point], list[str]]:
    """Returns a point for the newest time of each kernel and case on a device.  Emulated calls give bytes."""
    calls = [
        replace(record, kind="bench") if record.checked_by == "emulator" and record.traffic_bytes else record
        for record in records
    ]
    newest = newest_of(record for record in calls if record.kind == "bench" and record.status in NOT_WRONG)
    points, unplaced = placed(newest, [device.ceilings()], device)
    return list({(point.work, point.label): point for point in points}.values()), unplaced


def _priced(record: Record, roofs: Sequence[Ceilings]) -> tuple[Cost | None, str]:
    """Returns the cost of the record, or None and a reason if the cost is unknown or does not fit the roofline."""
    try:
        cost = cost_of(record)
    except ValueError as error:
        return None, str(error)
    if cost is None and record.op in ops():
        return None, "the record names no scheme"
    if cost is None:
        needed_values = {"FLOPs": record.flops, "bytes": record.least_bytes, "scheme": record.scheme}
        lacking = " and no ".join(name for name, value in needed_values.items() if value is None)
        reason = "its op is not registered here (--kernel FILE registers it)"
        return None, f"{reason}, and it names no {lacking}" if lacking and "imported" in record.environment else reason
    for roof in roofs:
        if lacks := ", ".join(cost.tensor_flops.keys() - roof.tensor_flops_per_s.keys()):
            return None, f"{roof.device} has no {roof.kind} matrix rate for {lacks}"
    return cost, ""


def _label(table: Table) -> str:
    """Returns the short names of a library and its kernel: `vllm flash_attn_fa3`."""
    kernel = re.sub("ScaledMM|LinearKernel$|Kernel$", "", table.kernel.rpartition(".")[2])
    return f"{table.framework} {kernel.removeprefix(f'{table.framework}_')}"


@dataclass(frozen=True)
class Drawing:
    """Holds the content of a figure before it is drawn."""

    points: list[Point]
    ceilings: list[Ceilings]
    name: str
    """The name of the device, or of the machine if another machine has the same device."""
    machine: str = ""
    """The key of the machine, if the figure shows a single machine."""
    unplaced: list[str] = field(default_factory=list)
    """The kernels without a point, each with the reason."""

    def files(self, fixed_axes: bool = False) -> dict[str, bytes]:
        """Returns the contents of the figure's SVG and PNG files, by suffix."""
        return roofline_files(self.points, self.ceilings, f"{self.name} roofline", fixed_axes)


def draw(drawing: Drawing, out: Path, fixed_axes: bool = False) -> list[Path]:
    """Draws a figure and returns the paths of its files.  If `out` is a folder, writes an SVG and a PNG into it.  If
    `out` ends with `.svg` or `.png`, writes only this file.
    """
    name = re.sub("[^a-z0-9]+", "-", drawing.name.lower()).strip("-")
    files = drawing.files(fixed_axes)
    if (suffix := out.suffix.removeprefix(".")) in files:
        return [write_whole(out, files[suffix])]
    return [write_whole(out / f"roofline-{name}.{suffix}", content) for suffix, content in files.items()]


def largest_case(spec: OpSpec, cases: Sequence[Case], scheme: Scheme, most_flops: float = float("inf")) -> Case:
    """Returns the case with the most FLOPs, then bytes.  Cases above `most_flops` FLOPs do not count."""

    def work(case: Case) -> tuple[float, float]:
        cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
        return cost.flops, cost.bytes

    return max((case for case in cases if work(case)[0] <= most_flops), key=work)


def largest_cases(records: Sequence[Record]) -> list[Record]:
    """Returns the records of the largest case of each op and scheme, because a figure has no room for more."""

    def size(record: Record) -> tuple[float, float, str]:
        return record.flops or 0.0, record.least_bytes or 0.0, record.case_id or ""

    benches = [record for record in records if record.kind == "bench"]
    groups = grouped(benches, lambda record: (record.op, record.scheme))
    largest = {key: max(group, key=size).case_id for key, group in groups.items()}
    return [record for record in benches if record.case_id == largest[record.op, record.scheme]]


def newest_of(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each machine, kernel and case.  `sources.choose` chooses these records."""
    sorted_records = sorted(records, key=lambda record: record.timestamp)
    located = [Located(record, Source("", 0, line, record.run_id)) for line, record in enumerate(sorted_records)]
    return [item.record for item in choose(benches_of(located))]


def drawing_of(machine: str, records: Sequence[Record], ceilings: Iterable[Ceilings]) -> Drawing:
    """Makes the content of a figure from one machine's records.  In the ceilings, the driver's name of the device
    replaces the shorter name in the data sheet."""
    roofs, gpu = list(ceilings), records[-1].environment.get("gpu") if records[-1].device != "cpu" else None
    name = str((gpu or {}).get("name") or roofs[-1].device)
    roofs = [replace(roof, device=name) for roof in roofs]
    points, unplaced = placed(records, roofs)
    return Drawing(points, roofs, name, machine, unplaced)


def drawings(
    records: Iterable[Record], all_cases: bool = False, runs: Sequence[str] = (), across: bool = False
) -> list[Drawing]:
    """Returns one figure for each machine that has a point.  The figure shows the largest case of each op, or all
    cases. `across` makes one figure for all machines.

    A figure shows the newest record of each kernel and case.  With `runs`, it shows only records of these runs; each
    entry is a part of a run's id.  The label of the case then names the run.  A CPU with another number of threads
    counts as another machine, because its ceilings differ."""
    roofed = (record for record in sorted(records, key=lambda record: record.timestamp) if record.ceilings)
    selected = (record for record in roofed if not runs or any(run in record.run_id for run in runs))
    figures: list[Drawing] = []
    for machine, machine_records in grouped(selected, machine_of).items():
        group = machine_records if all_cases else largest_cases(machine_records)
        parts = grouped(group, lambda record: f", run {record.run_id[-8:]}" if runs else "")
        by_run = [(drawing_of(machine, newest_of(subset), ceilings_of(group)), run) for run, subset in parts.items()]
        points = [replace(point, case=point.case + run) for drawing, run in by_run for point in drawing.points]
        unplaced = list(dict.fromkeys(reason for drawing, _ in by_run for reason in drawing.unplaced))
        figures += [replace(by_run[-1][0], points=points, unplaced=unplaced)] if points else []
    if across and len(figures) > 1:
        points = [replace(point, device=drawing.machine) for drawing in figures for point in drawing.points]
        ceilings = [replace(roof, device=drawing.machine) for drawing in figures for roof in drawing.ceilings]
        return [Drawing(points, ceilings, f"{len(figures)} machines")]
    names = Counter(drawing.name for drawing in figures)
    return [drawing if names[drawing.name] == 1 else replace(drawing, name=drawing.machine) for drawing in figures]


def why_nothing(records: Sequence[Record]) -> str:
    """Returns the reason why these records give no figure."""
    if any("imported" in record.environment and not record.ceilings for record in records):
        return (
            "an imported record names no ceilings (--gpu names the GPU whose ceilings are drawn; the record's time is "
            "drawn too if `import --column gpu==NAME` named the same GPU)"
        )
    unplaced = placed(records, ceilings_of(records))[1]
    return "no bench record with a time and a bound among them" + (f" ({unplaced[0]})" if unplaced else "")


def draw_records(records: Sequence[Record], folder: Path) -> list[Path]:
    """Makes all `drawings` of the records and draws them in `folder`.  Returns the paths."""
    return [path for drawing in drawings(records) for path in draw(drawing, folder)]


def bench_row(record: Record) -> dict[str, Any]:
    """Returns a record as one row of a printed table."""
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
