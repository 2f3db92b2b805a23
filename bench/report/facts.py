"""What records say of their circumstances: one record beside its main numbers, and a machine over all of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.records.record import Record
from rooflab.bench.report.sources import Located, Source, machine_of
from rooflab.bench.report.words import (
    commit_text,
    digits,
    metric_unit,
    moment,
    percent,
    plain_value,
    slug,
    throttling,
    whole,
)
from rooflab.roofline.points import si


def facts_of(record: Record, configs: int = 1, counted: Source | None = None) -> tuple[tuple[str, str], ...]:
    """Label and value of every circumstance that the record gives; what it does not give is left out."""
    rows: list[tuple[str, str | None]] = [
        ("made", moment(record.timestamp)),
        ("commit", commit_text(record.commit, record.dirty)),
        ("backend", record.backend),
        ("config", _config(record, configs)),
        ("timer", _timer(record)),
        ("samples", None if record.sample_count is None else f"{record.sample_count} kept in time order"),
        ("bound", None if record.bound_ms is None else f"{digits(record.bound_ms * 1e3, 4)} µs, {record.limiter}"),
        ("ceilings", None if record.ceilings is None else f"{record.ceilings['kind']}, {record.ceilings['device']}"),
        ("FLOPs of the op", None if not record.flops else f"{si(record.flops)}FLOP"),
        ("least bytes", None if not record.least_bytes else f"{si(record.least_bytes)}B"),
        ("traffic", _traffic(record, counted)),
        ("intensity", None if not record.intensity else f"{digits(record.intensity)} FLOP/byte"),
        ("peak memory", None if record.peak_memory_bytes is None else f"{si(record.peak_memory_bytes)}B"),
        ("predicted", _predicted(record)),
        ("checked by", record.checked_by),
        ("largest error over tolerance", _errors(record)),
        ("tolerance would pass", ", ".join(record.weak) or None),
        ("device kernels", ", ".join(record.device_kernels) or None),
        ("activity hash", record.activity_hash),
        ("kernel's file, SHA-256", _text(record.environment.get("kernel_file_sha256"))),
        *_clocks(record),
    ]
    return tuple((label, value) for label, value in rows if value)


def _config(record: Record, configs: int) -> str | None:
    if record.config is None:
        return None
    return plain_value(record.config) + (f" (fastest of {configs} in its run)" if configs > 1 else "")


def _timer(record: Record) -> str | None:
    if record.timer is None:
        return None
    return f"{record.timer}, {record.l2_state} cache" if record.l2_state else record.timer


def _traffic(record: Record, counted: Source | None) -> str | None:
    if not record.traffic_bytes:
        return "not known; the least bytes stand for it" if record.least_bytes else None
    by = f" in {counted.file}, line {counted.line}" if counted else ""
    return f"{si(record.traffic_bytes)}B, {record.traffic_basis or 'modelled'}{by}"


def _predicted(record: Record) -> str | None:
    if record.predicted_ms is None:
        return None
    error = record.prediction_error
    said = "uncalibrated" if error is None else f"held-out error {percent(error)}"
    return f"{digits(record.predicted_ms * 1e3, 4)} µs, {said}"


def _errors(record: Record) -> str | None:
    texts = [
        f"{stats.get('output', 'output')} {plain_value(stats['max_error_over_tolerance'])}"
        for stats in record.errors
        if "max_error_over_tolerance" in stats
    ]
    return ", ".join(texts) or None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _clocks(record: Record) -> list[tuple[str, str | None]]:
    """Every reading of the clocks, by the names that `clocks.ClockWatch` gives, and any that it does not."""
    rows: list[tuple[str, str | None]] = []
    for name, value in (record.clocks or {}).items():
        if value is None or value == [] or name == "throttle_names":
            continue
        if name == "throttle_reasons" and isinstance(value, int):
            rows.append(("clock held back by", throttling(value)))
            continue
        stem, unit = metric_unit(name)
        parts = value if isinstance(value, list | tuple) else [value]
        numbers = [part for part in parts if isinstance(part, int | float) and not isinstance(part, bool)]
        if unit == "Hz":
            numbers, unit = [number / 1e6 for number in numbers], "MHz"
        label = _LABELS.get(name, stem.replace("_", " "))
        text = " to ".join(map(plain_value, numbers)) if len(numbers) == len(parts) else plain_value(value)
        rows.append((f"{label}, {unit}" if unit else label, text))
    return rows


_LABELS = {
    "sm_clock_mhz": "SM clock by NVML",
    "sm_clock_hz": "SM clock read on the device",
    "sm_clock_range_hz": "its range",
    "locked_sm_clock_mhz": "SM clock locked to",
}


_VERSIONS = ("torch", "triton", "numpy", "python", "os")
_GPU: tuple[tuple[str, str], ...] = (
    ("driver", "driver"),
    ("sms", "SMs"),
    ("memory_bytes", "memory"),
    ("l2_bytes", "L2"),
    ("max_sm_clock_mhz", "highest SM clock, MHz"),
    ("max_memory_clock_mhz", "highest memory clock, MHz"),
    ("power_limit_w", "power limit, W"),
    ("ecc", "ECC"),
    ("mig", "MIG"),
)
_CPU: tuple[tuple[str, str], ...] = (
    ("cpu", "CPU"),
    ("cores", "logical processors"),
    ("memory_gib", "memory, GiB"),
    ("cache_bytes", "last-level cache"),
    ("threads", "torch threads"),
    ("matmul_precision", "matrix products"),
)
_READINGS = {
    "sm_clock_range_hz": "SM clock read on the device, MHz",
    "sm_clock_mhz": "SM clock by NVML, MHz",
    "memory_clock_mhz": "memory clock seen, MHz",
    "power_w": "power seen, W",
    "temperature_c": "temperature seen, C",
}


@dataclass(frozen=True)
class Fact:
    """One property; more than one value where runs differ, which is what a comparison between them must know."""

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


def machines_of(located: Sequence[Located]) -> tuple[Machine, ...]:
    """One entry for each machine, GPUs before CPUs, then by key."""
    groups: dict[str, list[Located]] = {}
    for item in located:
        groups.setdefault(machine_of(item.record), []).append(item)
    ordered = sorted(groups.items(), key=lambda pair: (not _has_gpu(pair[1]), pair[0]))
    return tuple(_machine(key, items, number) for number, (key, items) in enumerate(ordered, 1))


def _has_gpu(items: Sequence[Located]) -> bool:
    return bool(items[0].record.environment.get("gpu"))


def _machine(key: str, items: Sequence[Located], number: int) -> Machine:
    environments = [item.record.environment for item in items]
    gpus = [environment.get("gpu") or {} for environment in environments]
    name = str(gpus[-1].get("name") or environments[-1].get("cpu") or key)
    facts = [_fact(label, [gpu.get(field) for gpu in gpus], field) for field, label in _GPU]
    facts += [_fact(label, [environment.get(field) for environment in environments], field) for field, label in _CPU]
    facts += [_fact(field, [environment.get(field) for environment in environments], field) for field in _VERSIONS]
    facts += _clock_facts(items)
    return Machine(
        key=key,
        name=name,
        anchor=f"machine-{number}-{slug(name)}",
        facts=tuple(fact for fact in facts if fact.values),
        records=len(items),
        runs=len({item.record.run_id for item in items}),
        first=moment(items[0].record.timestamp),
        last=moment(items[-1].record.timestamp),
    )


def _fact(label: str, values: Sequence[Any], field: str) -> Fact:
    texts = [_field_text(field, value) for value in values if value is not None]
    return Fact(label, tuple(dict.fromkeys(texts)))


def _field_text(field: str, value: Any) -> str:
    if field.endswith("_bytes") and isinstance(value, int | float) and value > 0:
        return f"{si(value)}B"
    return plain_value(value)


def _clock_facts(items: Sequence[Located]) -> list[Fact]:
    """Least and largest of each reading over all records, and every throttle reason that was seen."""
    seen: dict[str, list[float]] = {}
    bits, asked = 0, False
    for item in items:
        clocks: Mapping[str, Any] = item.record.clocks or {}
        for name in _READINGS:
            scale = 1e-6 if name.endswith("_hz") else 1.0
            seen.setdefault(name, []).extend(round(scale * value, 1) for value in _numbers(clocks.get(name)))
        reasons = clocks.get("throttle_reasons")
        if isinstance(reasons, int):
            bits, asked = bits | reasons, True
    facts = [
        Fact(label, (f"{whole(min(seen[name]))} to {whole(max(seen[name]))}",))
        for name, label in _READINGS.items()
        if seen.get(name)
    ]
    return [*facts, *([Fact("clock held back by", (throttling(bits),))] if asked else [])]


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [float(number) for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
