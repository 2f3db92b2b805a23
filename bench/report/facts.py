"""The circumstances in the records: of one record beside its main numbers, and of a machine over all its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.core import Record
from rooflab.bench.report.sources import Located, Source, machine_of
from rooflab.bench.report.words import commit_text, metric_label, metric_text, moment, plain_value, slug
from rooflab.roofline.numbers import digits, percent, si

Facts = tuple[tuple[str, str], ...]


def facts_of(record: Record, configs: int = 1, counted: Source | None = None) -> Facts:
    """Label and value of each circumstance that the record gives; missing ones are left out."""
    by = f" in {counted.file}, line {counted.line}" if counted else ""
    errors = {stats.get("output", "output"): stats.get("max_error_over_tolerance") for stats in record.errors}
    rows: dict[str, Any] = {
        "made": moment(record.timestamp),
        "commit": commit_text(record.commit, record.dirty),
        "backend": record.backend,
        "config": plain_value(record.config or "") + (f" (fastest of {configs} in its run)" if configs > 1 else ""),
        "timer": ", ".join(filter(None, (record.timer, record.l2_state and f"{record.l2_state} cache"))),
        "samples": record.sample_count,
        "bound": record.bound_ms and f"{digits(record.bound_ms * 1e3, 4)} µs, {record.limiter}",
        "ceilings": record.ceilings and f"{record.ceilings['kind']}, {record.ceilings['device']}",
        "FLOPs of the op": record.flops and f"{si(record.flops)}FLOP",
        "least bytes": record.least_bytes and f"{si(record.least_bytes)}B",
        "traffic": record.traffic_bytes and f"{si(record.traffic_bytes)}B, {record.traffic_basis or 'modelled'}{by}",
        "intensity": record.intensity and f"{digits(record.intensity)} FLOP/byte",
        "peak memory": record.peak_memory_bytes and f"{si(record.peak_memory_bytes)}B",
        "predicted": predicted(record),
        "checked by": record.checked_by,
        "largest error over tolerance": plain_value(
            {name: value for name, value in errors.items() if value is not None}
        ),
        "tolerance would pass": ", ".join(record.weak),
        "device kernels": ", ".join(record.device_kernels),
        "activity hash": record.activity_hash,
        "Rooflab": record.environment.get("rooflab"),
        "kernel's file, SHA-256": record.environment.get("kernel_file_sha256"),
        **{metric_label(name): value_text(name, value) for name, value in (record.clocks or {}).items()},
    }
    return tuple((label, plain_value(value)) for label, value in rows.items() if value)


def predicted(record: Record) -> str:
    """The predicted time with the predictor's error, or nothing."""
    if record.predicted_ms is None:
        return ""
    error = record.prediction_error
    said = "uncalibrated" if error is None else f"held-out error {percent(error)}"
    return f"{digits(record.predicted_ms * 1e3, 4)} µs, {said}"


def value_text(name: str, value: Any) -> str:
    """A value in the unit that ends its name; a range for a list of two numbers; empty for None."""
    if isinstance(value, list | tuple):
        return (" to " if name.endswith(("_mhz", "_hz", "_w", "_c")) else ", ").join(
            value_text(name, one) for one in value
        )
    if isinstance(value, float) or name.endswith(("_bytes", "_hz")):
        return metric_text(name, value) if isinstance(value, int | float) and value > 0 else plain_value(value or "")
    return "" if value is None else plain_value(value)


@dataclass(frozen=True)
class Fact:
    """One property; several values if runs differ, which a reader must know to compare these runs."""

    label: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """One kind of machine, and what was run on it."""

    key: str
    name: str
    anchor: str
    facts: tuple[Fact, ...]
    records: int
    runs: int
    first: str
    last: str


_ELSEWHERE = {"machine_key", "gpu", "commit", "dirty", "imported", "name", "uuid"}
_ELSEWHERE |= {"tree", "kernel_file_sha256", "rooflab"}


def machines_of(located: Sequence[Located]) -> tuple[Machine, ...]:
    """One entry for each machine, GPUs before CPUs, then by key."""
    groups: dict[str, list[Located]] = {}
    for item in located:
        groups.setdefault(machine_of(item.record), []).append(item)
    ordered = sorted(groups.items(), key=lambda pair: (not pair[1][0].record.environment.get("gpu"), pair[0]))
    return tuple(_machine(key, items, number) for number, (key, items) in enumerate(ordered, 1))


def _machine(key: str, items: Sequence[Located], number: int) -> Machine:
    seen: dict[str, dict[str, None]] = {}
    for item in items:
        environment: Mapping[str, Any] = item.record.environment
        for field, value in {**(environment.get("gpu") or {}), **environment}.items():
            if field not in _ELSEWHERE and value is not None:
                seen.setdefault(metric_label(field), {})[value_text(field, value)] = None
    facts = [Fact(label, tuple(values)) for label, values in seen.items()]
    last = items[-1].record.environment
    name = str((last.get("gpu") or {}).get("name") or last.get("cpu") or key)
    return Machine(
        key=key,
        name=name,
        anchor=f"machine-{number}-{slug(name)}",
        facts=(*facts, *_clock_facts(items)),
        records=len(items),
        runs=len({item.record.run_id for item in items}),
        first=moment(items[0].record.timestamp),
        last=moment(items[-1].record.timestamp),
    )


def _clock_facts(items: Sequence[Located]) -> list[Fact]:
    """Smallest and largest value of each reading over all records, and every throttle reason seen."""
    seen: dict[str, list[float]] = {}
    reasons: dict[str, None] = {}
    asked = False
    for item in items:
        clocks: Mapping[str, Any] = item.record.clocks or {}
        asked = asked or clocks.get("throttle_reasons") is not None
        reasons |= dict.fromkeys(clocks.get("throttle_names") or ())
        for name in ("sm_clock_range_hz", "sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c"):
            values = clocks.get(name) if isinstance(clocks.get(name), list | tuple) else [clocks.get(name)]
            seen.setdefault(name, []).extend(value for value in values or () if isinstance(value, int | float))
    ends = {name: [min(values), max(values)] for name, values in seen.items() if values}
    facts = [Fact(metric_label(name), (value_text(name, both),)) for name, both in ends.items()]
    return [*facts, *([Fact("clock held back by", (", ".join(reasons) or "none",))] if asked else [])]
