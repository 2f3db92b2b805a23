"""Records as pytest-benchmark's JSON, which its own `compare` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest_benchmark
from pytest_benchmark.stats import Stats

from rooflab.bench.exchange.exported import benchmark_name, check_one_machine, replace_file, timed
from rooflab.bench.exchange.imported import Skipped
from rooflab.bench.exchange.pytest_benchmark_json import COUNTS, OURS, SUMMARY
from rooflab.bench.records.record import Record

STATISTICS = (*SUMMARY, "ops", *COUNTS, "iqr_outliers", "stddev_outliers", "outliers")
NEEDED = ("min", "max", "mean", "stddev", "median", "iqr", "rounds", "iterations")
"""What `pytest-benchmark compare` prints; a record without samples must have brought it along."""


def write_pytest_benchmark(records: Sequence[Record], path: Path) -> list[Skipped]:
    """Writes the timed records to `path` and returns what is not among them.

    Raises `ValueError` where they are of more than one machine, which the format cannot say, or none is left.
    """
    chosen, skipped = timed(records)
    benchmarks = []
    used = []
    for record in chosen:
        stats = _stats(record)
        if stats is None:
            skipped.append(Skipped(benchmark_name(record), "it has no samples and no statistics"))
        else:
            benchmarks.append(_benchmark(record, stats))
            used.append(record)
    check_one_machine(used)
    newest = max(used, key=lambda record: record.timestamp)
    values = {
        "machine_info": _machine(newest.environment),
        "commit_info": {
            "id": newest.commit or "unknown",
            "time": newest.timestamp,
            "author_time": newest.timestamp,
            "dirty": bool(newest.dirty),
            "project": OURS,
            "branch": "(unknown)",
        },
        "benchmarks": benchmarks,
        "datetime": newest.timestamp,
        "version": pytest_benchmark.__version__,
    }
    replace_file(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
    return skipped


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """pytest-benchmark's keys, the machine key in place of a host name; then ours."""
    system, _, machine = str(environment.get("os") or "").partition(" ")
    return {
        "node": environment.get("machine_key"),
        "processor": environment.get("cpu") or "",
        "machine": machine,
        "system": system,
        "release": "",
        "python_compiler": "",
        "python_implementation": "",
        "python_implementation_version": "",
        "python_version": environment.get("python") or "",
        "python_build": ["", ""],
        "cpu": {"brand_raw": environment.get("cpu"), "count": environment.get("cores")},
        OURS: {key: value for key, value in environment.items() if key not in ("commit", "dirty")},
    }


def _stats(record: Record) -> dict[str, Any] | None:
    """The statistics as pytest-benchmark computes them, in seconds, with the samples in time order."""
    samples = record.samples_s
    if samples:
        stats = Stats()
        for sample in samples:
            stats.update(sample)
        found = {name: getattr(stats, name) for name in STATISTICS if name != "iterations"}
        return {**found, "iterations": 1, "data": samples}
    kept = {name: record.metrics.get(f"{name}_s") for name in SUMMARY}
    kept |= {name: int(record.metrics[name]) for name in COUNTS if name in record.metrics}
    if any(kept.get(name) is None for name in NEEDED):
        return None
    mean = kept["mean"]
    return {**kept, "ops": 1 / mean if mean else 0.0, "outliers": "0;0", "iqr_outliers": 0, "stddev_outliers": 0}


def _benchmark(record: Record, stats: Mapping[str, Any]) -> dict[str, Any]:
    name = f"test_kernel[{record.op}/{record.kernel}-{record.case_id}-{record.scheme}]"
    ours = ("op", "kernel", "role", "backend", "case_id", "case", "scheme", "device", "l2_state", "seed", "timer")
    extra = {key: getattr(record, key) for key in (*ours, "run_id", "timestamp", "commit", "dirty")}
    extra |= {key: getattr(record, key) for key in ("latency_p20_ms", "latency_median_ms", "latency_p80_ms")}
    return {
        "group": f"{record.op} {record.case_id} {record.scheme}",
        "name": name,
        "fullname": f"rooflab::{name}",
        "params": dict(record.case),
        "param": f"{record.op}/{record.kernel}-{record.case_id}",
        "extra_info": {"status": "OK", OURS: {**extra, "case": dict(record.case)}},
        "options": {
            "disable_gc": True,
            "timer": record.timer or "unknown",
            "min_rounds": stats["rounds"],
            "max_time": 0.0,
            "min_time": 0.0,
            "warmup": True,
        },
        "stats": dict(stats),
    }
