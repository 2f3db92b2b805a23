"""What each machine allows, by kind of ceiling, and where each kernel stands below its ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from rooflab.bench.ceilings.readings import rate_of
from rooflab.bench.records.record import Record
from rooflab.bench.report.figures import as_ceilings, largest_cases, points_of
from rooflab.bench.report.ladders import OpLadder, Row
from rooflab.bench.report.sources import Chosen, Located, Source, machine_of
from rooflab.bench.report.words import digits, plain_value, whole
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.device import Device, identify
from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.points import Point, si

KINDS: tuple[CeilingKind, ...] = ("measured", "datasheet", "at_clock")


@dataclass(frozen=True)
class Rate:
    """One ceiling's value, and the record that says it; None where it is the table of GPUs' (`roofline/device.py`)."""

    text: str
    value: float
    source: Source | None
    is_time: bool = False
    """Whether it is a floor in seconds and no rate."""


@dataclass(frozen=True)
class CeilingRow:
    """One quantity, by kind of ceiling."""

    name: str
    rates: tuple[Rate | None, ...]
    """In the order of `KINDS`."""
    share: float | None
    """Measured over the data sheet's."""
    how: str
    """Timer and launch shape, of a reading."""


@dataclass(frozen=True)
class CeilingTable:
    """One machine's ceilings."""

    machine: str
    device: str
    clock: str
    """The clock behind the last column, where it was computed here."""
    rows: tuple[CeilingRow, ...]
    """What bounds a kernel."""
    readings: tuple[CeilingRow, ...]
    """What that was put together from: one row for each microkernel, its fastest launch shape."""


def ceiling_tables(located: Sequence[Located]) -> tuple[CeilingTable, ...]:
    """One table for each machine with a record that names ceilings or measured some."""
    machines: dict[str, list[Located]] = {}
    for item in located:
        if item.record.ceilings or item.record.kind == "ceiling":
            machines.setdefault(machine_of(item.record), []).append(item)
    return tuple(_table(machine, items) for machine, items in machines.items())


def ceilings_for(items: Sequence[Located]) -> dict[CeilingKind, tuple[Ceilings, Source | None]]:
    """The newest ceilings of each kind that the records of one machine were bounded by; the data sheet's, and those at
    the lowest clock seen, from the table of GPUs where no record has them."""
    found: dict[CeilingKind, tuple[Ceilings, Source | None]] = {}
    for item in items:
        if item.record.ceilings:
            ceilings = as_ceilings(item.record.ceilings)
            found[ceilings.kind] = (ceilings, item.source)
    known = known_device(items)
    if known is None:
        return found
    found.setdefault("datasheet", (known.ceilings(), None))
    clock = held_clock_mhz(items)
    if clock is not None and 0 < clock * 1e6 <= known.max_clock_hz:
        found.setdefault("at_clock", (known.ceilings(clock * 1e6), None))
    return found


def known_device(items: Sequence[Located]) -> Device | None:
    """The GPU that the records were made on, where the table of GPUs has it."""
    gpus = [item.record.environment.get("gpu") for item in items]
    names = [str(gpu.get("name", "")) for gpu in gpus if gpu]
    return identify(names[-1]) if names else None


def held_clock_mhz(items: Sequence[Located]) -> float | None:
    """The lowest SM clock that a record was made at; None where none was read.

    Of each record the clock that the device read itself, else the highest that NVML saw: its lowest may be idle.
    """
    found = []
    for item in items:
        clocks = item.record.clocks or {}
        held, seen = clocks.get("sm_clock_hz"), clocks.get("sm_clock_mhz")
        if isinstance(held, int | float) and held > 0:
            found.append(held / 1e6)
        elif isinstance(seen, list | tuple) and seen and isinstance(seen[-1], int | float) and seen[-1] > 0:
            found.append(float(seen[-1]))
    return min(found, default=None)


def _table(machine: str, items: Sequence[Located]) -> CeilingTable:
    found = ceilings_for(items)
    quantities = {kind: (_quantities(ceilings), source) for kind, (ceilings, source) in found.items()}
    names = dict.fromkeys(name for values, _ in quantities.values() for name in values)
    rows = [_row(name, {kind: _rate(name, *quantities[kind]) for kind in quantities}) for name in names]
    measured = [item for item in items if item.record.kind == "ceiling"]
    clock = held_clock_mhz(items) if "at_clock" in found and found["at_clock"][1] is None else None
    device = next(iter(found.values()))[0].device if found else machine
    readings = readings_of(measured, known_device(items))
    return CeilingTable(machine, device, f"{whole(clock)} MHz" if clock else "", tuple(rows), tuple(readings))


def _quantities(ceilings: Ceilings) -> dict[str, tuple[float, str]]:
    """Name to value and unit; what bounds nothing is left out."""
    values = {"memory bandwidth": (ceilings.hbm_bytes_per_s, "B/s")}
    values |= {f"matrix {dtype}": (rate, "FLOP/s") for dtype, rate in sorted(ceilings.tensor_flops_per_s.items())}
    values["vector fp32"] = (ceilings.vector_flops_per_s, "FLOP/s")
    if ceilings.sfu_ops_per_s:
        values["special functions"] = (ceilings.sfu_ops_per_s, "op/s")
    if ceilings.l2_bytes_per_s:
        values["L2 bandwidth"] = (ceilings.l2_bytes_per_s, "B/s")
    if ceilings.launch_floor_s:
        values["launch floor"] = (ceilings.launch_floor_s, "s")
    return values


def _rate(name: str, values: Mapping[str, tuple[float, str]], source: Source | None) -> Rate | None:
    return _as_rate(*values[name], source) if name in values else None


def _as_rate(value: float, unit: str, source: Source | None) -> Rate:
    is_time = unit == "s"
    return Rate(f"{digits(value * 1e6)} µs" if is_time else f"{si(value)}{unit}", value, source, is_time)


def _row(name: str, rates: Mapping[CeilingKind, Rate | None], how: str = "") -> CeilingRow:
    measured, sheet = rates.get("measured"), rates.get("datasheet")
    rates_of_both = measured and sheet and sheet.value > 0 and not measured.is_time
    share = measured.value / sheet.value if rates_of_both and measured and sheet else None
    return CeilingRow(name, tuple(rates.get(kind) for kind in KINDS), share, how)


def readings_of(items: Sequence[Located], device: Device | None) -> list[CeilingRow]:
    """One row for each microkernel of the newest run that timed it: its fastest launch shape, and what the data sheet
    says of that limit, at the clock of that very reading too."""
    best: dict[tuple[str, str], tuple[Located, Rate]] = {}
    for item in items:
        record, rate = item.record, _measured(item)
        if rate is None or record.status != "OK":
            continue
        key = (record.kernel or record.case_id or "limit", record.scheme or "")
        known = best.get(key)
        same_run = known is not None and known[0].record.run_id == record.run_id
        floor = "launch_floor_s" in record.metrics
        if known is None or not same_run or (rate.value < known[1].value if floor else rate.value > known[1].value):
            best[key] = (item, rate)
    rows = []
    for (name, scheme), (item, rate) in best.items():
        rates: dict[CeilingKind, Rate | None] = {"measured": rate}
        if device is not None and item.record.device == "cuda":
            rates |= _on_sheet(item, name, rate, device)
        config = f", {plain_value(item.record.config)}" if item.record.config else ""
        named = f"{name} {scheme}" if scheme and scheme not in name else name
        rows.append(_row(named, rates, f"{item.record.timer or 'timed'}{config}"))
    return rows


def _measured(item: Located) -> Rate | None:
    """The reading of a ceiling record, in the one field that holds it."""
    record = item.record
    values = (
        (record.bytes_per_s, "B/s"),
        (record.flops_per_s, "FLOP/s"),
        (record.metrics.get("ops_per_s"), "op/s"),
        (record.metrics.get("launch_floor_s"), "s"),
    )
    return next((_as_rate(value, unit, item.source) for value, unit in values if value and isfinite(value)), None)


def _on_sheet(item: Located, limit: str, rate: Rate, device: Device) -> dict[CeilingKind, Rate | None]:
    record = item.record
    if "launch_floor_s" in record.metrics:
        floor = device.launch_floor_s
        return {"datasheet": _as_rate(floor, "s", None) if floor else None}
    unit = "B/s" if record.bytes_per_s else "FLOP/s" if record.flops_per_s else "op/s"
    clock = record.metrics.get("sm_clock_hz")
    held = device.ceilings(min(clock, device.max_clock_hz)) if clock and clock > 0 else None
    found: dict[CeilingKind, Rate | None] = {}
    kinds: tuple[tuple[CeilingKind, Ceilings | None], ...] = (("datasheet", device.ceilings()), ("at_clock", held))
    for kind, ceilings in kinds:
        value = rate_of(ceilings, limit, record.scheme)
        found[kind] = _as_rate(value, unit, None) if value else None
    return found


def under_one_name(ceilings: Sequence[Ceilings], name: str) -> list[Ceilings]:
    """The same with one device's name: a card's own name and its data sheet's short one are one device in a figure."""
    return [replace(one, device=name) for one in ceilings]


@dataclass(frozen=True)
class Place:
    """One point and the row that it is drawn from."""

    point: Point
    row: Row
    case_id: str
    scheme: str
    largest: bool
    """Whether its case is the largest of its op and scheme on this machine."""


@dataclass(frozen=True)
class Roofline:
    """One machine's figure before it is drawn."""

    machine: str
    name: str
    """The device's, as its driver calls it."""
    places: tuple[Place, ...]
    ceilings: tuple[Ceilings, ...]
    unplaced: tuple[str, ...]
    """Kernels that have no place, each with the reason."""


def rooflines(located: Sequence[Located], chosen: Sequence[Chosen], ops: Sequence[OpLadder]) -> tuple[Roofline, ...]:
    """One for each machine with a point, from the records that speak for now."""
    rows = {
        (ladder.machine, op.op, row.kernel, block.case_id, block.scheme): row
        for op in ops
        for ladder in op.ladders
        for block in ladder.blocks
        for row in block.rows
    }
    found = []
    for machine in dict.fromkeys(machine_of(item.record) for item in chosen):
        own = [item for item in chosen if machine_of(item.record) == machine]
        ceilings = ceilings_for([item for item in located if machine_of(item.record) == machine])
        if not ceilings:
            continue
        gpu = own[-1].record.environment.get("gpu") or {}
        name = str(gpu.get("name") or next(iter(ceilings.values()))[0].device)
        roofs = under_one_name([one for one, _ in ceilings.values()], name)
        large = {id(record) for record in largest_cases([item.record for item in own])}
        places: list[Place] = []
        unplaced: list[str] = []
        for item in own:
            record = item.record
            point, why = _point(record, roofs)
            if point is None:
                unplaced += [f"{record.op}/{record.kernel}: {why}"] if why else []
                continue
            row = rows[machine, record.op or "", record.kernel or "", record.case_id or "", record.scheme or ""]
            places.append(Place(point, row, record.case_id or "", record.scheme or "", id(record) in large))
        if places:
            found.append(Roofline(machine, name, tuple(places), tuple(roofs), tuple(dict.fromkeys(unplaced))))
    return tuple(found)


def _point(record: Record, roofs: Sequence[Ceilings]) -> tuple[Point | None, str]:
    """The record's point, or None and why; no reason for a failed one, which is among the problems."""
    if record.status not in ("OK", "UNSUPPORTED"):
        return None, ""
    if record.op not in registry.ops():
        return None, "its op is not registered here, so its roof is not known"
    if record.scheme not in SCHEMES:
        return None, f"the scheme {record.scheme} is not known here"
    if record.case_id is None or record.role is None or record.kernel is None:
        return None, "its record names no case, kernel or role"
    try:
        registry.get_op(record.op).check_case(Case(**record.case))
    except ValueError as error:
        return None, str(error)
    if record.bound_ms is None or not record.bound_ms > 0:
        return None, "its record holds no bound"
    points = points_of([record])
    if not points:
        return None, "its record says neither traffic nor least bytes"
    dtype = points[0].dtype
    lacking = [roof.kind for roof in roofs if dtype is not None and dtype not in roof.tensor_flops_per_s]
    if lacking:
        return None, f"no {' or '.join(lacking)} matrix rate for {dtype}"
    return points[0], ""
