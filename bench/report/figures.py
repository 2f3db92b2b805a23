"""From records to roofline figures and ladder rows; no number is typed in by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.calls.selection import largest_case
from rooflab.bench.records.record import Record
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import get_op, kernels, ops
from rooflab.reference.spec import Case, OpSpec, get_scheme
from rooflab.roofline.device import Device
from rooflab.roofline.model import Ceilings, Cost, Traffic, bound
from rooflab.roofline.plot import roofline_files
from rooflab.roofline.points import Point
from rooflab.roofline.published import Table, times_of

META = torch.device("meta")


def roof_dtype(spec: OpSpec, case: Case, scheme: str) -> str | None:
    """The dtype of the op's matrix products, which selects its roof; None if the op has no matrix product."""
    cost = spec.cost(**spec.make_inputs(case, get_scheme(scheme), META, 0))
    return next(iter(cost.tensor_flops), None)


def points_of(records: Iterable[Record]) -> list[Point]:
    """A point for every bench record that has a time, a bound, and moves bytes.

    No point is of a kernel that failed its check, that was not timed, or whose reading is invalid or noise.
    """
    points = []
    for record in records:
        known = record.op in ops() and record.scheme is not None and record.bound_ms is not None
        moved = record.traffic_bytes or record.least_bytes
        latency = record.latency_median_ms
        if record.kind != "bench" or not known or not moved or record.status != "OK" or not latency:
            continue
        assert record.op and record.kernel and record.role and record.scheme and record.bound_ms, (
            "bench records have them"
        )
        points.append(
            Point(
                label=record.kernel,
                op=record.op,
                case=f"{record.case_id} {record.scheme}",
                role=record.role,
                dtype=roof_dtype(get_op(record.op), Case(**record.case), record.scheme),
                flops=record.flops or 0.0,
                traffic_bytes=moved,
                traffic_basis=record.traffic_basis or "modelled",
                bound_s=record.bound_ms / 1e3,
                seconds=latency / 1e3,
            )
        )
    return points


def as_ceilings(values: Mapping[str, Any]) -> Ceilings:
    """A record's ceilings, without unknown keys, which a newer minor version may have."""
    known = {field.name for field in fields(Ceilings)}
    return Ceilings(**{name: value for name, value in values.items() if name in known})


def ceilings_of(records: Iterable[Record]) -> list[Ceilings]:
    """The ceilings behind the records, the last of each device and kind."""
    found: dict[tuple[str, str], Ceilings] = {}
    for record in records:
        if record.ceilings:
            ceilings = as_ceilings(record.ceilings)
            key = ceilings.device, ceilings.kind
            found[key] = found[key] if ceilings.noise and key in found else ceilings
    return list(found.values())


Counted = Mapping[tuple[str, str, str, str], float]
"""Bytes of HBM traffic that the emulator counted, by op, kernel, case and scheme."""


def counted_in(records: Iterable[Record]) -> dict[tuple[str, str, str, str], float]:
    """The traffic in records of emulated checks and calls; the newest record of each key."""
    return {
        (str(record.op), str(record.kernel), str(record.case_id), str(record.scheme)): record.traffic_bytes
        for record in sorted(records, key=lambda record: record.timestamp)
        if record.checked_by == "emulator" and record.status == "OK" and record.traffic_bytes
    }


def bounds_on(
    device: Device, suite: str, scheme: str, only: Sequence[str] = (), counted: Counted | None = None
) -> tuple[list[Point], list[Ceilings]]:
    """Every kernel of one case of each op on a device that is not present: points with a bound and without a time; and
    the times that others published of these cases.

    The case is the largest by FLOPs and bytes, the usual reason to buy a device.  It comes from the `counted` cases, or
    from the suite's cases if no case of the op was counted.
    """
    counted = counted or {}
    ceilings = device.ceilings()
    points = []
    for name, spec in ops().items():
        if only and name not in only:
            continue
        own = scheme if scheme in spec.schemes else spec.schemes[0]  # an op of weights in int8 has none of bf16
        known = {case for op, _, case, dtypes in counted if (op, dtypes) == (name, own)}
        cases = [spec.check_case(Case.parse(case)) for case in known] or spec.get_cases(suite)
        case = largest_case(spec, cases, get_scheme(own))
        inputs = spec.make_inputs(case, get_scheme(own), META, 0)
        cost = spec.cost(**inputs)
        for kernel in kernels(name).values():
            if "cuda" not in kernel.devices:
                continue
            traffic = kernel.traffic_of(inputs, "cuda")
            if moved := counted.get((name, kernel.name, case.id, own)):
                traffic = Traffic(moved, 0.0, basis="counted")
            points.append(
                Point(
                    label=kernel.name,
                    op=name,
                    case=f"{case.id} {own}",
                    role=kernel.role,
                    dtype=next(iter(cost.tensor_flops), None),
                    flops=cost.flops,
                    traffic_bytes=traffic.bytes if traffic else cost.bytes,
                    traffic_basis=traffic.basis if traffic else "modelled",
                    bound_s=bound(cost, ceilings).seconds,
                    seconds=None,
                )
            )
        points += _published_points(name, case, own, cost, device)
    return points, [ceilings]


def _published_points(op: str, case: Case, scheme: str, cost: Cost, device: Device) -> list[Point]:
    """What others published of a case, at the intensity of the op's least bytes: their traffic is not known."""
    return [
        Point(
            label=_label(time.table),
            op=op,
            case=f"{case.id} {scheme}",
            role="peer",
            dtype=next(iter(cost.tensor_flops), None),
            flops=cost.flops,
            traffic_bytes=cost.bytes,
            traffic_basis="modelled",
            bound_s=bound(cost, device.ceilings()).seconds,
            seconds=time.seconds,
            published=True,
        )
        for time in times_of(op, scheme, case, device.name)
    ]


def _label(table: Table) -> str:
    """A library and its kernel in a few words: `vllm flash_attn_fa3`."""
    kernel = re.sub("ScaledMM|LinearKernel$|Kernel$", "", table.kernel.rpartition(".")[2])
    return f"{table.framework} {kernel.removeprefix(f'{table.framework}_')}"


def draw(points: Sequence[Point], ceilings: Sequence[Ceilings], folder: Path, note: str = "") -> list[Path]:
    """Draws the figure of one device as SVG and PNG in `folder`; returns their paths.  `note` is more of its name."""
    device = f"{ceilings[0].device} {note}".strip()
    name = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    files = roofline_files(points, ceilings, f"{device} roofline")
    return [write_whole(folder / f"roofline-{name}.{suffix}", content) for suffix, content in files.items()]


def largest_cases(records: Sequence[Record]) -> list[Record]:
    """For each op and scheme, the records of the case with most FLOPs, then bytes: a figure has no room for more."""
    records = [record for record in records if record.kind == "bench"]
    largest: dict[tuple[Any, Any], tuple[float, float, str]] = {}
    for record in records:
        size = (record.flops or 0.0, record.least_bytes or 0.0, record.case_id or "")
        key = (record.op, record.scheme)
        largest[key] = max(size, largest.get(key, size))
    return [record for record in records if record.case_id == largest[record.op, record.scheme][2]]


def draw_records(records: Sequence[Record], folder: Path, all_cases: bool = False) -> list[Path]:
    """Draws one figure for each device of the records, with each op's largest case or all; returns their paths.

    A CPU with another number of threads is another device: its ceilings are others.
    """
    paths: list[Path] = []
    records = records if all_cases else largest_cases(records)
    groups: dict[tuple[str, Any], list[Record]] = {}
    for record in records:
        if record.ceilings:
            threads = record.environment.get("threads") if record.device == "cpu" else None
            groups.setdefault((record.ceilings["device"], threads), []).append(record)
    for (device, threads), own in groups.items():
        several = sum(name == device for name, _ in groups) > 1
        note = f"with {threads} thread{'s' if threads != 1 else ''}" if several else ""
        points = points_of(own)
        if points:
            paths += draw(points, ceilings_of(own), folder, note)
    return paths


def bench_row(record: Record) -> dict[str, Any]:
    """One row of a printed table."""
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
