"""Each op's kernels as a ladder: naive, library, then the rungs in the order that the op's folder tells."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import get_args

from rooflab.bench.records.record import Record
from rooflab.bench.report.facts import facts_of
from rooflab.bench.report.sources import (
    Chosen,
    Located,
    Source,
    benches_of,
    choose,
    fault,
    kernel_key,
    latency_ms,
    machine_of,
    newest,
    shared_run,
)
from rooflab.bench.report.words import time_unit
from rooflab.kernels import registry
from rooflab.kernels.registry import Role

_ROLES: tuple[str, ...] = get_args(Role)
ABOVE_ROOF = 1.05
"""Bytes per second over the bandwidth ceiling that the spread of a measured ceiling no longer explains."""
_ENTRY = re.compile(r"^([A-Za-z]\w*)\s{2,}\S", re.MULTILINE)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as another kernel of the same case on the same machine: 2 is half the time."""

    value: float
    source: Source
    """Of the other kernel's record."""
    other_run: bool
    """Whether that one was timed in another run, and so perhaps under other versions or clocks."""


@dataclass(frozen=True)
class Row:
    """One kernel on one case."""

    kernel: str
    role: str
    backend: str
    status: str
    reason: str
    """Why there is no time, or what is wrong with it."""
    failed: bool
    latency_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    over_library: Ratio | None
    over_naive: Ratio | None
    bound_fraction: float | None
    limiter: str | None
    flops_per_s: float | None
    bytes_per_s: float | None
    traffic: str
    above_roof: bool
    """Whether its bytes per second are more than its ceilings' bandwidth: traffic is overstated, or was in cache."""
    checked_by: str
    facts: tuple[tuple[str, str], ...]
    source: Source


@dataclass(frozen=True)
class Block:
    """One case in one scheme: the kernels that can be compared with each other."""

    case_id: str
    scheme: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Ladder:
    """One op on one machine."""

    machine: str
    blocks: tuple[Block, ...]
    unit: str
    """Of the times in its table: `us` or `ms`."""
    flops_unit: str
    """Of its rates: `TFLOP/s` or `GFLOP/s`."""


@dataclass(frozen=True)
class CheckRow:
    """One kernel's newest checks on one machine, over all cases and schemes."""

    kernel: str
    machine: str
    checked_by: str
    right: int
    wrong: int
    not_run: int
    worst: float | None
    """Largest error over its tolerance."""
    weak: int
    """Cases whose tolerance would let a wrong answer pass."""
    source: Source


@dataclass(frozen=True)
class OpLadder:
    """All that is known of one op."""

    op: str
    order: tuple[str, ...]
    no_library: str
    """Why torch has no call for it, where it has none."""
    ladders: tuple[Ladder, ...]
    checks: tuple[CheckRow, ...]


def ladder_order(op: str) -> tuple[str, ...]:
    """The kernels of `op` in the order in which its folder's docstring names them; empty for an op of elsewhere."""
    folder = Path(registry.__file__).parent / op
    if not op.isidentifier() or not (folder / "__init__.py").is_file():
        return ()
    text = importlib.import_module(f"rooflab.kernels.{op}").__doc__ or ""
    known = registry.kernels(op)
    return tuple(dict.fromkeys(name for name in _ENTRY.findall(text) if name in known))


def op_ladders(located: Sequence[Located]) -> tuple[OpLadder, ...]:
    """One entry for each op that was timed or checked, by name."""
    benches = benches_of(located)
    checks = newest((item for item in located if item.record.kind == "check"), kernel_key)
    chosen = choose(benches)
    names = sorted({item.record.op or "no op" for item in (*benches, *checks)})
    found = []
    for op in names:
        order = ladder_order(op)
        own = [item for item in chosen if (item.record.op or "no op") == op]
        history = [item for item in benches if (item.record.op or "no op") == op]
        own_checks = [item for item in checks if (item.record.op or "no op") == op]
        machines = dict.fromkeys(machine_of(item.record) for item in own)
        spec = registry.ops().get(op)
        found.append(
            OpLadder(
                op=op,
                order=order,
                no_library=(spec.no_library or "") if spec else "",
                ladders=tuple(_ladder(machine, own, history, own_checks, order) for machine in machines),
                checks=_check_rows(own_checks, order),
            )
        )
    return tuple(found)


def _ladder(
    machine: str, chosen: Sequence[Chosen], history: Sequence[Located], checks: Sequence[Located], order: Sequence[str]
) -> Ladder:
    own = [item for item in chosen if machine_of(item.record) == machine]
    past = [item for item in history if machine_of(item.record) == machine]
    interpreted = {
        (item.record.kernel or "")
        for item in checks
        if machine_of(item.record) == machine and item.record.checked_by == "interpreter" and item.record.status == "OK"
    }
    groups: dict[tuple[str, str], list[Chosen]] = {}
    for item in sorted(own, key=_size):
        groups.setdefault(kernel_key(item.record)[3:], []).append(item)
    blocks = tuple(
        Block(case_id, scheme, _rows(group, past, interpreted, order)) for (case_id, scheme), group in groups.items()
    )
    times = [row.latency_ms for block in blocks for row in block.rows if row.latency_ms is not None]
    rates = [row.flops_per_s for block in blocks for row in block.rows if row.flops_per_s is not None]
    return Ladder(machine, blocks, time_unit(times), "TFLOP/s" if max(rates, default=0.0) >= 1e12 else "GFLOP/s")


def _size(item: Chosen) -> tuple[str, float, float]:
    """Small cases first within a scheme; what has one size keeps its order."""
    return item.record.scheme or "", item.record.flops or 0.0, item.record.least_bytes or 0.0


def _rank(kernel: str, role: str | None, order: Sequence[str]) -> tuple[int, int, str]:
    place = order.index(kernel) if kernel in order else len(order)
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES)), place, kernel


def _rows(
    group: Sequence[Chosen], past: Sequence[Located], interpreted: set[str], order: Sequence[str]
) -> tuple[Row, ...]:
    block = kernel_key(group[0].record)[3:]
    history = [item for item in past if kernel_key(item.record)[3:] == block]
    ordered = sorted(group, key=lambda item: _rank(item.record.kernel or "", item.record.role, order))
    return tuple(_row(item, group, history, interpreted) for item in ordered)


def _row(item: Chosen, group: Sequence[Chosen], history: Sequence[Located], interpreted: set[str]) -> Row:
    record = item.record
    latency, wrong = latency_ms(record), fault(record)
    status, reason = wrong or (record.status, record.reason)
    checked_by = record.checked_by
    if checked_by == "none" and wrong is None and (record.kernel or "") in interpreted:
        checked_by = "interpreter"
    if latency is None and wrong is None and not reason:
        reason = "the record holds no time"
    timed = latency is not None
    return Row(
        kernel=record.kernel or "no kernel",
        role=record.role or "none",
        backend=record.backend or "none",
        status=status,
        reason=reason,
        failed=wrong is not None,
        latency_ms=latency,
        p20_ms=record.latency_p20_ms if timed else None,
        p80_ms=record.latency_p80_ms if timed else None,
        over_library=_ratio(record, "library", group, history),
        over_naive=_ratio(record, "naive", group, history),
        bound_fraction=record.bound_fraction if timed else None,
        limiter=record.limiter,
        flops_per_s=record.flops_per_s if timed and record.flops else None,
        bytes_per_s=record.bytes_per_s if timed else None,
        traffic=(record.traffic_basis or "least bytes") if record.least_bytes or record.traffic_bytes else "none",
        above_roof=timed and _above_roof(record),
        checked_by=checked_by,
        facts=facts_of(record, item.configs, item.counted),
        source=item.source,
    )


def _above_roof(record: Record) -> bool:
    if record.bytes_per_s is None or record.ceilings is None:
        return False
    return bool(record.bytes_per_s > ABOVE_ROOF * record.ceilings["hbm_bytes_per_s"])


def _ratio(record: Record, role: str, group: Sequence[Chosen], history: Sequence[Located]) -> Ratio | None:
    own = latency_ms(record)
    if own is None or record.role == role:
        return None
    others = [item for item in group if item.record.role == role]
    past = [item for item in history if item.record.role == role]
    found = shared_run(others, past, record.run_id)
    if found is None:
        return None
    other, other_run = found
    base = latency_ms(other.record)
    assert base is not None, "shared_run returns timed records"
    return Ratio(base / own, other.source, other_run)


def _check_rows(checks: Sequence[Located], order: Sequence[str]) -> tuple[CheckRow, ...]:
    groups: dict[tuple[str, str], list[Located]] = {}
    for item in checks:
        groups.setdefault((machine_of(item.record), item.record.kernel or "no kernel"), []).append(item)
    rows = [
        (_rank(kernel, own[0].record.role, order), _check_row(machine, kernel, own))
        for (machine, kernel), own in groups.items()
    ]
    return tuple(row for _, row in sorted(rows, key=lambda pair: (pair[1].machine, pair[0])))


def _check_row(machine: str, kernel: str, own: Sequence[Located]) -> CheckRow:
    records = [item.record for item in own]
    ran = [record for record in records if record.status not in ("UNSUPPORTED", "UNAVAILABLE")]
    errors = [_worst(stats) for record in ran for stats in record.errors]
    return CheckRow(
        kernel=kernel,
        machine=machine,
        checked_by=", ".join(dict.fromkeys(record.checked_by for record in ran)) or "none",
        right=sum(record.status == "OK" for record in ran),
        wrong=sum(record.status != "OK" for record in ran),
        not_run=len(records) - len(ran),
        worst=max((error for error in errors if error is not None), key=_nan_last, default=None),
        weak=sum(bool(record.weak) for record in ran),
        source=own[-1].source,
    )


def _nan_last(error: float) -> float:
    return inf if isnan(error) else error


def _worst(stats: Mapping[str, object]) -> float | None:
    error = stats.get("max_error_over_tolerance")
    return float(error) if isinstance(error, int | float) else None
