"""Reads and writes pytest-benchmark's JSON.

A file that this module wrote names the op, kernel and case.  A kernel has the same name in all such files, so
pytest-benchmark can compare runs.  In any other file, a benchmark's full name identifies it.
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
    when,
)
from rooflab.bench.report.figures import cost_metrics
from rooflab.bench.report.sources import machine_of
from rooflab.bench.report.trends.points import why_not
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case
from rooflab.roofline.model import Ceilings

TOOL = "pytest-benchmark"
OURS = "rooflab"
"""The key in `extra_info` and `machine_info` for values of our exporter and plugin that pytest-benchmark lacks."""
SUMMARY = ("min", "max", "mean", "stddev", "median", "iqr", "q1", "q3", "ld15iqr", "hd15iqr", "total")
"""The statistics, in seconds, that a record keeps in `metrics`."""
COUNT_NAMES = ("rounds", "iterations")
NAME_KEYS = ("group", "name", "fullname", "params", "param")
"""pytest-benchmark's names of a benchmark.  The record of an imported benchmark keeps them for a later export."""
IDENTITY = ("op", "kernel", "role", "backend", "case_id", "case", "scheme", "device", "l2_state", "seed")
LATENCY_NAMES = ("latency_p20_ms", "latency_median_ms", "latency_p80_ms")
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
    """Holds a file of pytest-benchmark."""

    machine_info: Mapping[str, Any]
    benchmarks: tuple[OneBenchmark, ...]
    datetime: str
    commit_info: Mapping[str, Any] | None = None
    version: Any = None


@dataclass(frozen=True)
class BenchmarkTimes:
    """Holds the median and the samples of a test, in seconds."""

    median: float
    data: tuple[float, ...] | None = None


def read_pytest_benchmark(path: Path) -> Imported:
    """Returns one record per benchmark.  Raises `ValueError` with the place if the file is not pytest-benchmark's."""
    json_text = read_text(path)
    benchmark_file = decoded(BenchmarkFile, parse_json(json_text, path.name), path.name)
    file_environment = _environment(benchmark_file, path.name)
    result_file = ResultFile(TOOL, when(benchmark_file.datetime, f"{path.name}, datetime"), json_text, file_environment)
    for benchmark_index, benchmark in enumerate(benchmark_file.benchmarks):
        benchmark_place = f"{path.name}, benchmarks[{benchmark_index}]"
        if not benchmark.stats:
            result_file.skip(benchmark.fullname, "it has no statistics: it failed or was disabled")
            continue
        extra_info = benchmark.extra_info or {}
        exported_fields = decoded_fields(Record, extra_info.get(OURS) or {}, f"{benchmark_place}.extra_info.{OURS}")
        op_case, identity_fields = _what(benchmark, extra_info, exported_fields)
        latency_ms, time_fields = _reading(benchmark, extra_info, exported_fields, benchmark_place, result_file)
        values = _commit(benchmark_file.commit_info or {}) | identity_fields | time_fields
        values = _rooflined(values, latency_ms, extra_info, f"{benchmark_place}.extra_info")
        if not exported_fields:
            original_names = {field_name: getattr(benchmark, field_name) for field_name in NAME_KEYS}
            values["environment"] = file_environment | {
                "imported": file_environment["imported"] | {"benchmark": original_names}
            }
        result_file.add(benchmark_place, op_case, latency_ms, values)
    return result_file.imported()


def _environment(file: BenchmarkFile, name: str) -> dict[str, Any]:
    """Returns the machine that a benchmark file describes, without its host name. Records never contain host names."""
    machine_info, commit_info = file.machine_info, file.commit_info or {}
    cpu, ours = machine_info.get("cpu") or {}, machine_info.get(OURS) or {}
    if not (isinstance(cpu, dict) and isinstance(ours, dict)):
        raise ValueError(f"{name}, machine_info: expected objects as cpu and {OURS}, got {cpu!r} and {ours!r}")
    cpu_name = str(cpu.get("brand_raw") or machine_info.get("processor") or machine_info.get("machine") or "unknown")
    fields = environment(
        TOOL,
        cpu_name,
        cpu=cpu_name,
        cores=cpu.get("count"),
        os=" ".join(str(machine_info[key]) for key in ("system", "machine") if machine_info.get(key)) or None,
        python=machine_info.get("python_version"),
        version=str(file.version),
        project=commit_info.get("project"),
        file=name,
    )
    fields["imported"]["implementation"] = machine_info.get("python_implementation")
    # Values of our exporter or plugin replace these, with the machine key: so the machine is that of our records.
    return fields | {key: value for key, value in ours.items() if key in fields and key not in ("imported", "commit")}


def _commit(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the measured commit and its dirty flag. Both are None if the commit is not a hash, as in `unknown`."""
    commit_id, dirty = str(values.get("id", values.get("commit"))), values.get("dirty")
    is_hash = re.fullmatch("[0-9a-f]{7,64}", commit_id) is not None
    return {"commit": commit_id if is_hash else None, "dirty": dirty if is_hash and isinstance(dirty, bool) else None}


def _what(benchmark: OneBenchmark, extra: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[Case, dict[str, Any]]:
    """Returns what a benchmark measured: its case, and fields such as its op and kernel.

    `ours` has these fields if our exporter wrote the file.  Otherwise, the case has the test's parameters.  The op is
    the test's group, or else its function.  The kernel is the test's full name without parameters."""
    name, fullname = benchmark.name, benchmark.fullname
    if ours:
        return Case(), {key: ours.get(key) for key in IDENTITY} | (_commit(ours) if "commit" in ours else {})
    plugin_fields = {"l2_state": extra.get("l2_state"), "device": extra.get("device_type")} if "timer" in extra else {}
    test_name, bracket, params_text = name.partition("[")
    params_case = _case(benchmark.params or {}, params_text.removesuffix("]"))
    names_of_test = {"op": str(benchmark.group or test_name), "kernel": fullname.removesuffix(bracket + params_text)}
    return params_case, plugin_fields | names_of_test


def _case(params: object, test_id: str) -> Case:
    """Makes a case (names and values) from the parameters of a pytest test. Also stores pytest's test id, because
    object parameters may differ only there. An id that only repeats the values is left out."""
    parameters = params if isinstance(params, Mapping) else {"param": params}
    readable_params = {name: param for name, param in parameters.items() if "UNSERIALIZABLE[" not in str(param)}
    case, value_texts = make_case(readable_params), [str(param) for param in parameters.values()]
    if not test_id:
        return case
    is_plain_id = "-".join(value_texts) == test_id and "" not in value_texts and dict(Case.parse(case.id)) == dict(case)
    return case if is_plain_id else make_case({**readable_params, "id": test_id})


def _reading(
    benchmark: OneBenchmark, extra: Mapping[str, Any], ours: Mapping[str, Any], place: str, source: ResultFile
) -> tuple[float | None, dict[str, Any]]:
    """Returns a benchmark's median latency in ms, and its record fields for status, samples and statistics.

    If a sample is negative or not finite, the status is INVALID, and no valid latency is returned.  Latencies that
    Rooflab's exporter wrote are not recomputed.  pytest-benchmark's statistics stay in seconds."""
    stats = benchmark.stats or {}
    times, options = decoded(BenchmarkTimes, stats, f"{place}.stats"), benchmark.options or {}
    original_timer = ours.get("timer") or extra.get("timer") or options.get("timer")
    samples, exact_values = times.data or (), {name: ours[name] for name in LATENCY_NAMES if ours.get(name) is not None}
    median_ms = exact_values.get("latency_median_ms", times.median * 1e3)
    stat_names = {f"{name}_s": name for name in SUMMARY} | {name: name for name in COUNT_NAMES}
    stat_values = {record_name: stats[name] for record_name, name in stat_names.items() if stats.get(name) is not None}
    time_fields: dict[str, Any] = {
        "timer": f"imported: {TOOL}, {original_timer}" if original_timer else f"imported: {TOOL}",
        "metrics": source.finite(stat_values, place),
        "status": "OK",
    }
    imported_status, _, fault_text = str(extra.get("status")).partition(": ")
    if imported_status in ("INVALID", "NOISY") and fault_text:  # our plugin's form; any other text has no known meaning
        time_fields |= {"status": imported_status, "reason": fault_text}
    bad_texts = [f"a sample of {sample:g} s" for sample in samples if not (math.isfinite(sample) and sample >= 0)]
    if bad_texts:
        return None if is_time(median_ms) else median_ms, time_fields | {"status": "INVALID", "reason": bad_texts[0]}
    if samples:
        p20, p80 = (float(np.percentile(samples, percent_rank)) * 1e3 for percent_rank in (20, 80))
        time_fields |= {"samples": Record.packed(samples), "sample_count": len(samples)}
        time_fields |= {"latency_p20_ms": p20, "latency_p80_ms": p80} | exact_values
    return median_ms, time_fields


def _rooflined(
    values: dict[str, Any], latency_ms: float | None, extra: Mapping[str, Any], place: str
) -> dict[str, Any]:
    """Adds FLOP/s, bytes/s and the roofline bound to `values`. Changes nothing if the test passed no cost (FLOPs and
    bytes) to the fixture `kernel_benchmark`."""
    work_cost = extra.get("cost")
    if not work_cost:
        return values
    try:
        values["metrics"] |= cost_metrics(work_cost)
        is_noisy = values["status"] == "NOISY"
        is_timed = values["status"] == "OK" or (is_noisy and "ceilings" in extra)
        if not is_timed or latency_ms is None or not is_time(latency_ms):
            return values
        latency_s, flops, moved = latency_ms / 1e3, float(extra["flops"]), float(extra["bytes"])
        fields: dict[str, Any] = {"flops": flops, "least_bytes": moved, "intensity": flops / moved if moved else None}
        if not is_noisy:  # no rate is made of noise
            fields |= {"flops_per_s": flops / latency_s, "bytes_per_s": moved / latency_s}
        if "ceilings" in extra:
            bound_s, device_ceilings = float(extra["bound_s"]), decoded(Ceilings, extra["ceilings"])
            fields |= {"bound_ms": bound_s * 1e3, "limiter": extra["limiter"], "ceilings": asdict(device_ceilings)}
            fields["bound_fraction"] = None if is_noisy or device_ceilings.noise else bound_s / latency_s
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{place}: expected the values of kernel_benchmark(..., cost=...), got {error}") from error
    return values | fields


STATISTIC_NAMES = (*SUMMARY, "ops", "rounds", "iqr_outliers", "stddev_outliers", "outliers")


def write_pytest_benchmark(records: Sequence[Record], path: Path) -> list[Skipped]:
    """Writes the fastest config of the newest run for each name to `path`.  Returns the records that it skipped.

    The format holds one result per name, and one machine.  Raises `ValueError` if the records are of several machines,
    or if none has samples.
    """
    faults = [why_not(record) or ("" if record.samples else "it has no samples") for record in records]
    skips = [
        Skipped(benchmark_name(record), ": ".join(filter(None, (fault, record.reason))))
        for record, fault in zip(records, faults, strict=True)
        if fault
    ]
    timed_records = [record for record, fault in zip(records, faults, strict=True) if not fault]
    record_by_name = _by_name(timed_records)
    written_records = [record for record in timed_records if record_by_name[_names(record)["fullname"]] is record]
    duplicates = [record for record in timed_records if record_by_name[_names(record)["fullname"]] is not record]
    skips += [Skipped(benchmark_name(record), "another run or config of its name is written") for record in duplicates]
    machine_names = dict.fromkeys(machine_of(record) for record in timed_records)
    if len(machine_names) != 1:
        machines_text = ", ".join(machine_names) or "none"
        raise ValueError(
            f"machine: expected records of one, with samples, got {machines_text}; choose by --machine or file"
        )
    newest_record = max(written_records, key=lambda record: record.timestamp)
    values = {
        "machine_info": _machine(newest_record.environment),
        "commit_info": {
            "id": newest_record.commit or "unknown",
            "time": newest_record.timestamp,
            "author_time": newest_record.timestamp,
            "dirty": bool(newest_record.dirty),
            "project": OURS,
            "branch": "(unknown)",
        },
        "benchmarks": [_benchmark(record, _stats(record.samples_s)) for record in written_records],
        "datetime": newest_record.timestamp,
        "version": pytest_benchmark.__version__,
    }
    write_whole(path, json.dumps(values, indent=1, allow_nan=False) + "\n")
    return skips


def _by_name(records: Sequence[Record]) -> dict[str, Record]:
    """Chooses the newest record for each benchmark name. From a run with several configs, it chooses the fastest."""
    newest_by_name: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: record.timestamp):
        name = _names(record)["fullname"]
        earlier_record = newest_by_name.get(name, record)
        is_same_search = earlier_record.run_id == record.run_id and earlier_record.config != record.config
        if not is_same_search or (record.latency_median_ms or 0.0) < (earlier_record.latency_median_ms or 0.0):
            newest_by_name[name] = record
    return newest_by_name


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a machine with keys of pytest-benchmark and Rooflab. `node` is the machine key, not the host name."""
    os_name, _, machine_name = str(environment.get("os") or "").partition(" ")
    return {
        "node": environment.get("machine_key"),
        "processor": environment.get("cpu") or "",
        "machine": machine_name,
        "system": os_name,
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
    """Returns the statistics of samples in seconds, with pytest-benchmark's names. The samples keep their order."""
    stats = Stats()
    for sample_s in samples:
        stats.update(sample_s)
    return {**{name: getattr(stats, name) for name in STATISTIC_NAMES}, "iterations": 1, "data": samples}


def _names(record: Record) -> dict[str, Any]:
    """Returns a benchmark's names for pytest-benchmark, from the imported file or else the record's kernel and case."""
    imported_names = (record.environment.get("imported") or {}).get("benchmark")
    if imported_names:
        return {field_name: imported_names[field_name] for field_name in NAME_KEYS}
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
    field_names = (*IDENTITY, "timer", "run_id", "timestamp", "commit", "dirty", *LATENCY_NAMES)
    extra_info = {field_name: getattr(record, field_name) for field_name in field_names}
    return {
        **_names(record),
        "extra_info": {"status": "OK", OURS: {**extra_info, "case": dict(record.case)}},
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
