"""Formats details of records for a report, such as commit and config, and collects the properties of machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rooflab.bench.base.plain import Row, in_utc
from rooflab.bench.core import Record
from rooflab.bench.report.sources import Located, Source, grouped, machine_of
from rooflab.roofline.numbers import digits, metric_label, metric_text, percent, plain_value, si

Facts = tuple[tuple[str, str], ...]


def commit_text(commit: str | None, dirty: bool | None) -> str:
    """Returns the first eight digits of a commit, and adds "dirty" if the working tree had changes."""
    if not commit:
        return "no commit"
    return f"{commit[:8]} dirty" if dirty else commit[:8]


def moment(timestamp: str) -> str:
    """Formats an ISO 8601 time to the minute, in UTC: `2026-11-21 05:53 UTC`."""
    return f"{datetime.fromisoformat(in_utc(timestamp)):%Y-%m-%d %H:%M} UTC"


def slug(text: str) -> str:
    """Converts `text` into an HTML anchor, which has only lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"


def facts_of(record: Record, configs: int = 1, counted: Source | None = None) -> Facts:
    """Returns the details of a record as pairs of label and value: commit, config, timer and so on."""
    place = f" in {counted.file}, line {counted.line}" if counted else ""
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
        "traffic": record.traffic_bytes and f"{si(record.traffic_bytes)}B, {record.traffic_basis or 'modelled'}{place}",
        "intensity": record.intensity and f"{digits(record.intensity)} FLOP/byte",
        "peak memory": record.peak_memory_bytes and f"{si(record.peak_memory_bytes)}B",
        "predicted": predicted(record),
        "checked by": record.checked_by,
        "largest error over tolerance": plain_value(
            {name: field_value for name, field_value in errors.items() if field_value is not None}
        ),
        "tolerance would pass": ", ".join(record.weak),
        "device kernels": ", ".join(record.device_kernels),
        "activity hash": record.activity_hash,
        "Rooflab": record.environment.get("rooflab"),
        "kernel's file, SHA-256": record.environment.get("kernel_file_sha256"),
        **{metric_label(name): value_text(name, field_value) for name, field_value in (record.clocks or {}).items()},
    }
    return tuple((label, plain_value(field_value)) for label, field_value in rows.items() if field_value)


def predicted(record: Record) -> str:
    """Formats a record's predicted time and the predictor's error.  The text is empty without a prediction."""
    if record.predicted_ms is None:
        return ""
    prediction_error = record.prediction_error
    error_note = "uncalibrated" if prediction_error is None else f"held-out error {percent(prediction_error)}"
    return f"{digits(record.predicted_ms * 1e3, 4)} µs, {error_note}"


def value_text(name: str, value: Any) -> str:
    """Formats a value in the unit at the end of its name.  Two numbers become a range.  None becomes an empty text."""
    if isinstance(value, list | tuple):
        return (" to " if name.endswith(("_mhz", "_hz", "_w", "_c")) else ", ").join(
            value_text(name, item) for item in value
        )
    if isinstance(value, float) or name.endswith(("_bytes", "_hz")):
        return metric_text(name, value) if isinstance(value, int | float) and value > 0 else plain_value(value or "")
    return "" if value is None else plain_value(value)


_FIELDS_SHOWN_ELSEWHERE = {"machine_key", "gpu", "commit", "dirty", "imported", "name", "uuid"}
_FIELDS_SHOWN_ELSEWHERE |= {"tree", "kernel_file_sha256", "rooflab"}


def machines_of(located: Sequence[Located]) -> tuple[Row, ...]:
    """Returns a row for each machine in the records, with the number of its records and runs.  GPUs come before CPUs,
    and each group is sorted by name.

    A machine's `facts` are pairs of a property's name and its values, several if the property differs between runs."""
    records_by_machine = grouped(located, lambda item: machine_of(item.record)).items()
    sorted_groups = sorted(records_by_machine, key=lambda pair: (not pair[1][0].record.environment.get("gpu"), pair[0]))
    machines = []
    for machine_number, (key, machine_records) in enumerate(sorted_groups, 1):
        last_environment = machine_records[-1].record.environment
        name = str((last_environment.get("gpu") or {}).get("name") or last_environment.get("cpu") or key)
        machine = {
            "key": key,
            "name": name,
            "anchor": f"machine-{machine_number}-{slug(name)}",
            "facts": _facts([item.record for item in machine_records]),
            "records": len(machine_records),
            "runs": len({item.record.run_id for item in machine_records}),
            "first": moment(machine_records[0].record.timestamp),
            "last": moment(machine_records[-1].record.timestamp),
        }
        machines.append(machine)
    return tuple(machines)


_CLOCK_READING_NAMES = ("sm_clock_range_hz", "sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c")


def _facts(records: Sequence[Record]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the records' values of each machine property. Clocks, power and temperature show only their range."""
    values_by_label: dict[str, dict[str, None]] = {}
    values_by_name: dict[str, list[float]] = {name: [] for name in _CLOCK_READING_NAMES}
    for record in records:
        environment, clocks = record.environment, record.clocks or {}
        for name, field_value in {**(environment.get("gpu") or {}), **environment}.items():
            if name not in _FIELDS_SHOWN_ELSEWHERE and field_value is not None:
                values_by_label.setdefault(metric_label(name), {})[value_text(name, field_value)] = None
        for name, all_numbers in values_by_name.items():
            values = clocks.get(name) if isinstance(clocks.get(name), list | tuple) else [clocks.get(name)]
            all_numbers += [field_value for field_value in values or () if isinstance(field_value, int | float)]
    facts = [(label, tuple(values)) for label, values in values_by_label.items()]
    range_by_name = {
        name: [min(all_numbers), max(all_numbers)] for name, all_numbers in values_by_name.items() if all_numbers
    }
    facts += [(metric_label(name), (value_text(name, value_range),)) for name, value_range in range_by_name.items()]
    clock_readings = [
        record.clocks for record in records if record.clocks and record.clocks.get("throttle_reasons") is not None
    ]
    throttle_names = dict.fromkeys(reason for clocks in clock_readings for reason in clocks.get("throttle_names") or ())
    return (*facts, *([("clock held back by", (", ".join(throttle_names) or "none",))] if clock_readings else []))
