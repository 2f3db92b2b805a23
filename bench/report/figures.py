"""Makes roofline figures and table rows from records of measurements.  No number is written by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.decode import decoded
from rooflab.bench.compile.cases import largest_case
from rooflab.bench.core import Record
from rooflab.bench.report.sources import (
    NOT_WRONG_STATUSES,
    Located,
    Source,
    benches_of,
    choose,
    grouped,
    latency_ms,
    machine_of,
)
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import get_op, kernels, ops
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import Device, identify
from rooflab.roofline.model import Ceilings, Cost, bound
from rooflab.roofline.plot import roofline_files
from rooflab.roofline.points import Point
from rooflab.roofline.published import Table, times_of

META = torch.device("meta")


NO_BYTES_REASON = "its cost has no bytes, and so it has no intensity"


def placed(
    records: Iterable[Record], roofs: Sequence[Ceilings], device: Device | None = None
) -> tuple[list[Point], list[str]]:
    """Converts records (measurements) into points of a roofline chart. Also returns why correct kernels have no point.

    Failed checks and invalid times are ignored. If `device` is None, records without a time are ignored too.

    If `device` is a GPU, its ceilings `roofs` give the bounds, and records of other GPUs give points without a time."""
    points, skip_reasons = [], []
    for record in records:
        median_ms, bound_s = record.latency_median_ms, (record.bound_ms or 0.0) / 1e3
        if record.kind != "bench" or record.status not in NOT_WRONG_STATUSES or not (median_ms or device):
            continue
        op_cost, skip_reason = _priced(record, roofs)
        flops, least_bytes = record.flops or 0.0, record.least_bytes
        if device and op_cost:
            flops, least_bytes, bound_s = op_cost.flops, op_cost.bytes, bound(op_cost, roofs[0]).seconds
            gpu = (record.environment.get("gpu") or {}) if record.device != "cpu" else {}
            median_ms = latency_ms(record) if identify(str(gpu.get("name", ""))) == device else None
        elif op_cost is None and "imported" in record.environment and record.op not in ops() and not device:
            skip_reason = ""  # the record has its own bound, which needs no cost
        moved_bytes = record.traffic_bytes or least_bytes
        if not skip_reason and not moved_bytes:
            skip_reason = NO_BYTES_REASON if least_bytes == 0 else "its record says neither traffic nor least bytes"
        if not skip_reason and not bound_s > 0:
            skip_reason = "its record holds no bound"
        if skip_reason or not moved_bytes:
            skip_reasons.append(f"{record.op}/{record.kernel}: {skip_reason}")
            continue
        op, kernel = str(record.op), str(record.kernel)
        registered_kernel = kernels(op).get(kernel) if op in ops() and record.scheme else None
        point = Point(
            label=kernel,
            op=op,
            case=" ".join(case_part for case_part in (record.case_id, record.scheme) if case_part),
            role=record.role or (registered_kernel.role if registered_kernel else "benchmark"),
            dtype=next(iter(op_cost.tensor_flops), None) if op_cost else None,
            flops=flops,
            traffic_bytes=moved_bytes,
            traffic_basis=record.traffic_basis or "modelled",
            bound_s=bound_s,
            seconds=median_ms and median_ms / 1e3,
            noisy=record.status == "NOISY" or bool((record.ceilings or {}).get("noise")),
        )
        points.append(point)
    return points, list(dict.fromkeys(skip_reasons))


COST_PREFIX, TENSOR = "cost_", "cost_tensor_flops_"
"""The prefixes of metrics that hold the cost of another repository's benchmark, whose op is not known here."""


def cost_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Converts the fields of a `Cost` (FLOPs and bytes) into metrics of a record."""
    tensor = {f"{TENSOR}{dtype}": float(flops) for dtype, flops in values["tensor_flops"].items()}
    return {f"{COST_PREFIX}{name}": float(value) for name, value in values.items() if name != "tensor_flops"} | tensor


def cost_of(record: Record) -> Cost | None:
    """Returns the cost (FLOPs and bytes) of a record, or None if it is unknown.

    The first of these sources that exists gives the cost: the record's metrics, its op and case, or the FLOPs and bytes
    of an imported record. Raises `ValueError` if the op rejects the case and the record has no other source."""
    values: dict[str, Any] = {item.name: record.metrics.get(f"{COST_PREFIX}{item.name}", 0) for item in fields(Cost)}
    if any(values.values()):
        tensor = {name.removeprefix(TENSOR): flops for name, flops in record.metrics.items() if name.startswith(TENSOR)}
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
    """Returns the newest ceilings of each kind in the records.  `records` must be sorted, oldest first."""
    roof_by_kind: dict[str, Ceilings] = {}
    for record in records:
        if record.ceilings:
            ceilings = decoded(Ceilings, record.ceilings)
            roof_by_kind[ceilings.kind] = roof_by_kind.get(ceilings.kind, ceilings) if ceilings.noise else ceilings
    return list(roof_by_kind.values())


def bounds_on(device: Device, suite: str, scheme: str, only: Sequence[str] = ()) -> tuple[list[Point], list[Ceilings]]:
    """Returns roofline points for a device that this machine does not have, and the device's ceilings.

    Each kernel has a bound without a time, at its op's largest case.  Published times of these cases are added."""
    ceilings = device.ceilings()
    points = []
    for name, spec in ops().items():
        if only and name not in only:
            continue
        # An op of weights in int8 has no bf16 scheme.
        scheme_name = scheme if scheme in spec.schemes else spec.schemes[0]
        case = largest_case(spec, spec.get_cases(suite), get_scheme(scheme_name))
        inputs = spec.make_inputs(case, get_scheme(scheme_name), META, 0)
        op_cost = spec.cost_of(inputs)
        if not only and not op_cost.tensor_flops.keys() <= ceilings.tensor_flops_per_s.keys():
            continue
        # Published times take this place too, because the traffic of their kernels is not known.
        op_point = Point(
            label="",
            op=name,
            case=f"{case.id} {scheme_name}",
            role="peer",
            dtype=next(iter(op_cost.tensor_flops), None),
            flops=op_cost.flops,
            traffic_bytes=op_cost.bytes,
            traffic_basis="modelled",
            bound_s=bound(op_cost, ceilings).seconds,
            seconds=None,
        )
        for kernel in kernels(name).values():
            sm_major, sm_minor = device.compute_capability
            if "cuda" not in kernel.devices or (kernel.min_sm or 0) > 10 * sm_major + sm_minor:
                continue
            if kernel.why_not_args(inputs, spec) is not None:
                continue
            traffic = kernel.traffic_of(inputs, "cuda")
            point = replace(op_point, traffic_bytes=traffic.bytes, traffic_basis=traffic.basis) if traffic else op_point
            points.append(replace(point, label=kernel.name, role=kernel.role))
        for known_time in times_of(name, scheme_name, case, device.name):
            points.append(replace(op_point, label=_label(known_time.table), seconds=known_time.seconds, published=True))
    return points, [ceilings]


def placed_on(records: Iterable[Record], device: Device) -> tuple[list[Point], list[str]]:
    """Returns a point on `device` for each kernel and case, from the newest record with a time or emulated bytes."""
    call_records = [
        replace(record, kind="bench") if record.checked_by == "emulator" and record.traffic_bytes else record
        for record in records
    ]
    newest_records = newest_of(
        record for record in call_records if record.kind == "bench" and record.status in NOT_WRONG_STATUSES
    )
    points, skip_reasons = placed(newest_records, [device.ceilings()], device)
    return list({(point.work, point.label): point for point in points}.values()), skip_reasons


def _priced(record: Record, roofs: Sequence[Ceilings]) -> tuple[Cost | None, str]:
    """Returns the cost of a record. If no roofline point can be computed, returns None and the reason."""
    try:
        op_cost = cost_of(record)
    except ValueError as error:
        return None, str(error)
    if op_cost is None and record.op in ops():
        return None, "the record names no scheme"
    if op_cost is None:
        needed_values = {"FLOPs": record.flops, "bytes": record.least_bytes, "scheme": record.scheme}
        missing_names = " and no ".join(name for name, field_value in needed_values.items() if field_value is None)
        skip_reason = "its op is not registered here (--kernel FILE registers it)"
        return (
            None,
            f"{skip_reason}, and it names no {missing_names}"
            if missing_names and "imported" in record.environment
            else skip_reason,
        )
    for roof in roofs:
        if missing_dtypes := ", ".join(op_cost.tensor_flops.keys() - roof.tensor_flops_per_s.keys()):
            return None, f"{roof.device} has no {roof.kind} matrix rate for {missing_dtypes}"
    return op_cost, ""


def _label(table: Table) -> str:
    """Returns the short name of a library and its kernel, such as `vllm flash_attn_fa3`."""
    kernel = re.sub("ScaledMM|LinearKernel$|Kernel$", "", table.kernel.rpartition(".")[2])
    return f"{table.framework} {kernel.removeprefix(f'{table.framework}_')}"


@dataclass(frozen=True)
class Drawing:
    """Holds the data of one roofline figure: its points, its ceilings and its name."""

    points: list[Point]
    ceilings: list[Ceilings]
    name: str
    """The name of the device, or of the machine if another machine has the same device."""
    machine: str = ""
    """The key of the machine, if the figure shows a single machine."""
    unplaced: list[str] = field(default_factory=list)
    """The kernels without a point, each with the reason."""

    def files(self, fixed_axes: bool = False) -> dict[str, bytes]:
        """Draws the figure as SVG and PNG.  Returns the contents of both files, by suffix."""
        return roofline_files(self.points, self.ceilings, f"{self.name} roofline", fixed_axes)


def draw(drawing: Drawing, out: Path, fixed_axes: bool = False) -> list[Path]:
    """Writes a figure to files and returns their paths.  If `out` is a folder, writes an SVG and a PNG into it.  If
    `out` ends with `.svg` or `.png`, writes only this file.
    """
    name = re.sub("[^a-z0-9]+", "-", drawing.name.lower()).strip("-")
    files = drawing.files(fixed_axes)
    if (suffix := out.suffix.removeprefix(".")) in files:
        return [write_whole(out, files[suffix])]
    return [write_whole(out / f"roofline-{name}.{suffix}", file_content) for suffix, file_content in files.items()]


def largest_cases(records: Sequence[Record]) -> list[Record]:
    """Returns the records of the largest case of each op and scheme (dtypes), because a figure has little room."""

    def size(record: Record) -> tuple[float, float, str]:
        return record.flops or 0.0, record.least_bytes or 0.0, record.case_id or ""

    benches = [record for record in records if record.kind == "bench"]
    records_by_op = grouped(benches, lambda record: (record.op, record.scheme))
    largest_case_ids = {op_scheme: max(group, key=size).case_id for op_scheme, group in records_by_op.items()}
    return [record for record in benches if record.case_id == largest_case_ids[record.op, record.scheme]]


def newest_of(records: Iterable[Record]) -> list[Record]:
    """Returns the newest record of each machine, kernel, case and scheme."""
    sorted_records = sorted(records, key=lambda record: record.timestamp)
    items = [Located(record, Source("", 0, line_no, record.run_id)) for line_no, record in enumerate(sorted_records)]
    return [item.record for item in choose(benches_of(items))]


def drawing_of(machine: str, records: Sequence[Record], ceilings: Iterable[Ceilings]) -> Drawing:
    """Makes a figure's data from one machine's records, with the driver's name of the device, not the data sheet's."""
    roofs, gpu = list(ceilings), records[-1].environment.get("gpu") if records[-1].device != "cpu" else None
    name = str((gpu or {}).get("name") or roofs[-1].device)
    roofs = [replace(roof, device=name) for roof in roofs]
    points, skip_reasons = placed(records, roofs)
    return Drawing(points, roofs, name, machine, skip_reasons)


def drawings(
    records: Iterable[Record], all_cases: bool = False, runs: Sequence[str] = (), across: bool = False
) -> list[Drawing]:
    """Returns one roofline figure for each machine, or with `across` one figure for all machines.

    A figure shows each kernel's newest record at its op's largest case, or with `all_cases` at all cases.  `runs`
    limits it to runs whose id contains one of these texts.  A CPU with another thread count is another machine."""
    sorted_records = (record for record in sorted(records, key=lambda record: record.timestamp) if record.ceilings)
    selected_records = (record for record in sorted_records if not runs or any(run in record.run_id for run in runs))
    all_drawings: list[Drawing] = []
    for machine, machine_records in grouped(selected_records, machine_of).items():
        group = machine_records if all_cases else largest_cases(machine_records)
        groups = grouped(group, lambda record: f", run {record.run_id[-8:]}" if runs else "")
        by_run = [(drawing_of(machine, newest_of(subset), ceilings_of(group)), run) for run, subset in groups.items()]
        points = [replace(point, case=point.case + run) for drawing, run in by_run for point in drawing.points]
        skip_reasons = list(dict.fromkeys(skip_reason for drawing, _ in by_run for skip_reason in drawing.unplaced))
        all_drawings += [replace(by_run[-1][0], points=points, unplaced=skip_reasons)] if points else []
    if across and len(all_drawings) > 1:
        points = [replace(point, device=drawing.machine) for drawing in all_drawings for point in drawing.points]
        ceilings = [replace(roof, device=drawing.machine) for drawing in all_drawings for roof in drawing.ceilings]
        return [Drawing(points, ceilings, f"{len(all_drawings)} machines")]
    names = Counter(drawing.name for drawing in all_drawings)
    return [drawing if names[drawing.name] == 1 else replace(drawing, name=drawing.machine) for drawing in all_drawings]


def why_nothing(records: Sequence[Record]) -> str:
    """Returns a text that says why no figure can be made from these records."""
    if any("imported" in record.environment and not record.ceilings for record in records):
        return (
            "an imported record names no ceilings (--gpu names the GPU whose ceilings are drawn; the record's time is "
            "drawn too if `import --column gpu==NAME` named the same GPU)"
        )
    skip_reasons = placed(records, ceilings_of(records))[1]
    return "no bench record with a time and a bound among them" + (f" ({skip_reasons[0]})" if skip_reasons else "")


def draw_records(records: Sequence[Record], folder: Path) -> list[Path]:
    """Makes all figures for the records and writes them to `folder`.  Returns their paths."""
    return [picture_path for drawing in drawings(records) for picture_path in draw(drawing, folder)]


def bench_row(record: Record) -> dict[str, Any]:
    """Converts a record into one row of a printed table."""
    median_ms, bound_ms = record.latency_median_ms, record.bound_ms
    return {
        "op": record.op,
        "kernel": record.kernel,
        "role": record.role,
        "case": record.case_id,
        "scheme": record.scheme,
        "status": record.status,
        "latency_ms": median_ms,
        "p20_ms": record.latency_p20_ms,
        "p80_ms": record.latency_p80_ms,
        "bound_ms": bound_ms,
        "of_bound": record.bound_fraction,
        "limiter": record.limiter,
        "gflops_per_s": None if record.flops_per_s is None else record.flops_per_s / 1e9,
        "gbytes_per_s": None if record.bytes_per_s is None else record.bytes_per_s / 1e9,
        "reason": record.reason,
    }
