"""Records in the forms of two dashboards: github-action-benchmark and Bencher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.exchange.exported import benchmark_name, check_one_machine, replace_file, timed
from rooflab.bench.exchange.imported import Skipped
from rooflab.bench.records.record import Record


def write_github_action(records: Sequence[Record], path: Path) -> list[Skipped]:
    """The `customSmallerIsBetter` list of github-action-benchmark; returns what is not in it.

    Raises `ValueError` where the records are of several machines, because a chart has one.
    """
    chosen, skipped = timed(records)
    check_one_machine(chosen)
    items: list[dict[str, Any]] = []
    for record in chosen:
        item = {"name": benchmark_name(record), "unit": "ms", "value": record.latency_median_ms}
        if record.latency_p20_ms is not None and record.latency_p80_ms is not None:
            item["range"] = f"{record.latency_p20_ms:.6g} - {record.latency_p80_ms:.6g}"
        known = (("machine", record.environment.get("machine_key")), ("timer", record.timer), ("commit", record.commit))
        items.append(item | {"extra": "\n".join(f"{name}: {value}" for name, value in known if value)})
    replace_file(path, json.dumps(items, indent=1, allow_nan=False) + "\n")
    return skipped


def write_bencher(records: Sequence[Record], path: Path) -> list[Skipped]:
    """Bencher Metric Format: `latency` in nanoseconds with its 20th and 80th percentile as bounds, by benchmark.

    Returns what is not in it; of several records of one name the newest stands.  Raises `ValueError` where the records
    are of several machines, which are testbeds of their own there.
    """
    chosen, skipped = timed(records)
    check_one_machine(chosen)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for record in sorted(chosen, key=lambda each: each.timestamp):
        bounds = (("lower_value", record.latency_p20_ms), ("upper_value", record.latency_p80_ms))
        values = {name: value * 1e6 for name, value in (("value", record.latency_median_ms), *bounds) if value}
        if benchmark_name(record) in found:
            skipped.append(Skipped(benchmark_name(record), "an older record of the same name"))
        found[benchmark_name(record)] = {"latency": values}
    replace_file(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return skipped
