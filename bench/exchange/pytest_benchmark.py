"""Reads and writes pytest-benchmark's JSON.

A file from our exporter names the op, kernel and case.  In any other file, a benchmark is identified by its full name:
file, class, function and parameters.  pytest-benchmark itself can compare runs in the files that this module writes: a
kernel has the same name in all of these files.  An imported benchmark keeps its name, group and parameters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest_benchmark
from pytest_benchmark.stats import Stats

from rooflab.bench.base.decode import decoded, decoded_fields
from rooflab.bench.core import Record
from rooflab.bench.exchange.files import (
    Imported,
    ResultFile,
    Skipped,
    benchmark_name,
    environment,
    is_time,
    make_case,
    parse_json,
    read_text,
    timed,
    when,
)
from rooflab.bench.report.figures import cost_metrics
from rooflab.bench.report.sources import machine_of
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case
from rooflab.roofline.model import Ceilings

TOOL = "pytest-benchmark"
OURS = "rooflab"
"""The key in `extra_info` and `machine_info` for values of our exporter and plugin that pytest-benchmark lacks."""
SUMMARY = ("min", "max", "mean", "stddev", "median", "iqr", "q1", "q3", "ld15iqr", "hd15iqr", "total")
"""The statistics, in seconds, that a record keeps in `metrics`."""
COUNTS = ("rounds", "iterations")
NAMES = ("group", "name", "fullname", "params", "param")
"""pytest-benchmark's names of a benchmark.  The record of an imported benchmark keeps them for a later export."""
IDENTITY = ("op", "kernel", "role", "backend", "case_id", "case", "scheme", "device", "l2_state", "seed")
LATENCIES = ("latency_p20_ms", "latency_median_ms", "latency_p80_ms")
"""The fields of a record that our exporter writes unchanged."""
SUITE = "bench/bench_kernels.py"


@dataclass(frozen=True)
class OneBenchmark:
    """Holds the result of one test in a file of pytest-benchmark."""

    fullname: str
    name: str
    group: Any = None
    params: Any = None
    param: Any = None
    stats: Mapping[str, Any] | None = None
    extra_info: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class BenchmarkFile:
    """A file of pytest-benchmark."""

    machine_info: Mapping[str, Any]
    benchmarks: tuple[OneBenchmark, ...]
    datetime: str
    commit_info: Mapping[str, Any] | None = None
    version: Any = None


@dataclass(frozen=True)
class BenchmarkTimes:
    """Holds the statistics of a test that are times, in seconds."""

    median: float
    data: tuple[float, ...] | None = None


def read_pytest_benchmark(path: Path) -> Imported:
    """Returns one record per benchmark.  Raises `ValueError` with the place if the file is not pytest-benchmark's."""
    text = read_text(path)
    file = decoded(BenchmarkFile, parse_json(text, path.name), path.name)
    around = _environment(file, path.name)
    source = ResultFile(TOOL, when(file.datetime, f"{path.name}, datetime"), text, around)
    for number, benchmark in enumerate(file.benchmarks):
        location = f"{path.name}, benchmarks[{number}]"
        if not benchmark.stats:
            source.skip(benchmark.fullname, "it has no statistics: it failed or was disabled")
            continue
        extra = benchmark.extra_info or {}
        ours = decoded_fields(Record, extra.get(OURS) or {}, f"{location}.extra_info.{OURS}")
        case, identity = _what(benchmark, extra, ours)
        latency_ms, reading = _reading(benchmark, extra, ours, location, source)
        values = _commit(file.commit_info or {}) | identity | reading
        values = _rooflined(values, latency_ms, extra, f"{location}.extra_info")
        if not ours:
            names = {key: getattr(benchmark, key) for key in NAMES}
            values["environment"] = around | {"imported": around["imported"] | {"benchmark": names}}
        source.add(location, case, latency_ms, values)
    return source.imported()


def _environment(file: BenchmarkFile, name: str) -> dict[str, Any]:
    """Returns the machine of the file without its host name, because records hold no host name."""
    machine, commit = file.machine_info, file.commit_info or {}
    cpu, ours = machine.get("cpu") or {}, machine.get(OURS) or {}
    if not (isinstance(cpu, dict) and isinstance(ours, dict)):
        raise ValueError(f"{name}, machine_info: expected objects as cpu and {OURS}, got {cpu!r} and {ours!r}")
    label = str(cpu.get("brand_raw") or machine.get("processor") or machine.get("machine") or "unknown")
    fields = environment(
        TOOL,
        label,
        cpu=label,
        cores=cpu.get("count"),
        os=" ".join(str(machine[key]) for key in ("system", "machine") if machine.get(key)) or None,
        python=machine.get("python_version"),
        version=str(file.version),
        project=commit.get("project"),
        file=name,
    )
    fields["imported"]["implementation"] = machine.get("python_implementation")
    # Values of our exporter or plugin replace these, with the machine key: so the machine is that of our records.
    return fields | {key: value for key, value in ours.items() if key in fields and key not in ("imported", "commit")}


def _commit(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the commit of the measured code.  Returns None if the value is not a hash, such as `unknown`."""
    commit, dirty = str(values.get("id", values.get("commit"))), values.get("dirty")
    is_hash = re.fullmatch("[0-9a-f]{7,64}", commit) is not None
    return {"commit": commit if is_hash else None, "dirty": dirty if is_hash and isinstance(dirty, bool) else None}


def _what(benchmark: OneBenchmark, extra: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[Case, dict[str, Any]]:
    """Returns the case, op and kernel of a benchmark.  A file of our exporter gives all three.  In any other file, the
    parameters are the case, and the group (or the function) is the op.  The kernel is the full name without parameters.
    """
    name, fullname = benchmark.name, benchmark.fullname
    if ours:
        return Case(), {key: ours.get(key) for key in IDENTITY} | (_commit(ours) if "commit" in ours else {})
    around = {"l2_state": extra.get("l2_state"), "device": extra.get("device_type")} if "timer" in extra else {}
    function, bracket, params_text = name.partition("[")
    case = _case(benchmark.params or {}, params_text.removesuffix("]"))
    names_of_test = {"op": str(benchmark.group or function), "kernel": fullname.removesuffix(bracket + params_text)}
    return case, around | names_of_test


def _case(params: object, test_id: str) -> Case:
    """Makes a case of the parameters, and adds the test's id.  The id is left out if it only joins the values by `-`
    and the case's text can be parsed.  Parameters without a text, such as objects, differ only in the id."""
    parameters = params if isinstance(params, Mapping) else {"param": params}
    readable_params = {name: value for name, value in parameters.items() if "UNSERIALIZABLE[" not in str(value)}
    case, texts = make_case(readable_params), [str(value) for value in parameters.values()]
    if not test_id:
        return case
    spelt = "-".join(texts) == test_id and "" not in texts and dict(Case.parse(case.id)) == dict(case)
    return case if spelt else make_case({**readable_params, "id": test_id})


def _reading(
    benchmark: OneBenchmark, extra: Mapping[str, Any], ours: Mapping[str, Any], place: str, source: ResultFile
) -> tuple[float | None, dict[str, Any]]:
    """Returns the latency (None if a sample is not a possible time), and the fields for status, samples and statistics.

    Our exporter's values are exact; the statistics of pytest-benchmark are in seconds."""
    stats = benchmark.stats or {}
    times, options = decoded(BenchmarkTimes, stats, f"{place}.stats"), benchmark.options or {}
    original = ours.get("timer") or extra.get("timer") or options.get("timer")
    data, exact_values = times.data or (), {name: ours[name] for name in LATENCIES if ours.get(name) is not None}
    median_ms = exact_values.get("latency_median_ms", times.median * 1e3)
    names = {f"{name}_s": name for name in SUMMARY} | {name: name for name in COUNTS}
    statistics = {ours_too: stats[name] for ours_too, name in names.items() if stats.get(name) is not None}
    result: dict[str, Any] = {
        "timer": f"imported: {TOOL}, {original}" if original else f"imported: {TOOL}",
        "metrics": source.finite(statistics, place),
        "status": "OK",
    }
    verdict, _, reason = str(extra.get("status")).partition(": ")
    if verdict in ("INVALID", "NOISY") and reason:  # our plugin's form; any other text has no known meaning
        result |= {"status": verdict, "reason": reason}
    bad = [f"a sample of {value:g} s" for value in data if not (math.isfinite(value) and value >= 0)]
    if bad:
        return None if is_time(median_ms) else median_ms, result | {"status": "INVALID", "reason": bad[0]}
    if data:
        p20, p80 = (float(np.percentile(data, share)) * 1e3 for share in (20, 80))
        result |= {"samples": Record.packed(data), "sample_count": len(data)}
        result |= {"latency_p20_ms": p20, "latency_p80_ms": p80} | exact_values
    return median_ms, result


def _rooflined(
    values: dict[str, Any], latency_ms: float | None, extra: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """Adds roofline fields to `values`: the cost that the test passed to the fixture `kernel_benchmark`, the rates, and
    the bound with its ceilings."""
    cost = extra.get("cost")
    if not cost:
        return values
    try:
        values["metrics"] |= cost_metrics(cost)
        if values["status"] != "OK" or latency_ms is None or not is_time(latency_ms):
            return values
        seconds, flops, moved = latency_ms / 1e3, float(extra["flops"]), float(extra["bytes"])
        fields: dict[str, Any] = {"flops": flops, "least_bytes": moved, "intensity": flops / moved if moved else None}
        fields |= {"flops_per_s": flops / seconds, "bytes_per_s": moved / seconds}
        if "ceilings" in extra:
            bound_s, ceilings = float(extra["bound_s"]), decoded(Ceilings, extra["ceilings"])
            fields |= {"bound_ms": bound_s * 1e3, "limiter": extra["limiter"], "ceilings": asdict(ceilings)}
            fields["bound_fraction"] = None if ceilings.noise else bound_s / seconds
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{place}: expected the values of kernel_benchmark(..., cost=...), got {error}") from error
    return values | fields


STATISTICS = (*SUMMARY, "ops", "rounds", "iqr_outliers", "stddev_outliers", "outliers")


def write_pytest_benchmark(records: Sequence[Record], path: Path) -> list[Skipped]:
    """Writes the timed records to `path`, and returns the records that it skipped.

    pytest-benchmark takes one result per name.  It is the result of the newest run, with the run's fastest config.
    Raises `ValueError` if the records are of several machines, which the format cannot hold, or if no record is left.
    """
    timed_records, skipped = timed(records)
    skipped += [Skipped(benchmark_name(record), "it has no samples") for record in timed_records if not record.samples]
    timed_records = [record for record in timed_records if record.samples]
    by_name = _by_name(timed_records)
    written_records = [record for record in timed_records if by_name[_names(record)["fullname"]] is record]
    others = [record for record in timed_records if by_name[_names(record)["fullname"]] is not record]
    skipped += [Skipped(benchmark_name(record), "another run or config of its name is written") for record in others]
    machines = dict.fromkeys(machine_of(record) for record in timed_records)
    if len(machines) != 1:
        names = ", ".join(machines) or "none"
        raise ValueError(f"machine: expected records of one, with samples, got {names}; choose by --machine or file")
    newest = max(written_records, key=lambda record: record.timestamp)
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
        "benchmarks": [_benchmark(record, _stats(record.samples_s)) for record in written_records],
        "datetime": newest.timestamp,
        "version": pytest_benchmark.__version__,
    }
    write_whole(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
    return skipped


def _by_name(records: Sequence[Record]) -> dict[str, Record]:
    """Returns, by full name of a benchmark, the record to write."""
    newest: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        name = _names(record)["fullname"]
        earlier = newest.get(name, record)
        searched = earlier.run_id == record.run_id and earlier.config != record.config
        if not searched or (record.latency_median_ms or 0.0) < (earlier.latency_median_ms or 0.0):
            newest[name] = record
    return newest


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the machine under pytest-benchmark's keys and under ours.  The host name is the machine key."""
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
        OURS: {key: value for key, value in environment.items() if key not in ("commit", "dirty", "imported")},
    }


def _stats(samples: Sequence[float]) -> dict[str, Any]:
    """Returns pytest-benchmark's statistics of the samples, in seconds.  The samples keep their order."""
    stats = Stats()
    for sample in samples:
        stats.update(sample)
    return {**{name: getattr(stats, name) for name in STATISTICS}, "iterations": 1, "data": samples}


def _names(record: Record) -> dict[str, Any]:
    """Returns names for pytest-benchmark: the names of the imported file, or names made from the record's kernel."""
    theirs = (record.environment.get("imported") or {}).get("benchmark")
    if theirs:
        return {key: theirs[key] for key in NAMES}
    test_id = "-".join(part for part in (f"{record.op}/{record.kernel}", record.case_id, record.scheme) if part)
    name = f"test_kernel[{test_id}]"
    params = {"op": record.op, "kernel": record.kernel, "case": record.case_id, "scheme": record.scheme}
    return {
        "group": " ".join(part for part in (record.op, record.case_id, record.scheme) if part),
        "name": name,
        "fullname": f"{SUITE}::{name}",
        "params": {**record.case, **params},
        "param": test_id,
    }


def _benchmark(record: Record, stats: Mapping[str, Any]) -> dict[str, Any]:
    ours = (*IDENTITY, "timer", "run_id", "timestamp", "commit", "dirty", *LATENCIES)
    extra = {key: getattr(record, key) for key in ours}
    return {
        **_names(record),
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
