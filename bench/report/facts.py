"""What a record says beside its main numbers: shown when its row or its point is asked."""

from __future__ import annotations

from rooflab.bench.records.record import Record
from rooflab.bench.report.sources import Source
from rooflab.bench.report.words import commit_text, digits, metric_unit, moment, percent, plain_value, throttling
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
