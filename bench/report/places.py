"""Where each kernel stands on its machine's roofline, with everything that its record says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooflab.bench.records.record import Record
from rooflab.bench.report.ceilings import ceilings_for, under_one_name
from rooflab.bench.report.figures import largest_cases, points_of
from rooflab.bench.report.ladders import OpLadder, Row
from rooflab.bench.report.newest import Chosen, machine_of
from rooflab.bench.report.sources import Located
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.model import Ceilings
from rooflab.roofline.points import Point


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
