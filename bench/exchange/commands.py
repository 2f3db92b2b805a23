"""What `rooflab import` and `rooflab export` do, apart from drawing; and flashinfer-bench traces as records."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from rooflab.bench.calls.selection import pick_device
from rooflab.bench.exchange.files import (
    Imported,
    Skipped,
    environment,
    get,
    get_object,
    make_case,
    positive,
    run_id,
    when,
    write_csv,
    write_records,
)
from rooflab.bench.exchange.flashinfer_check import ORACLE, DefinitionCheck, Options, check_definitions
from rooflab.bench.exchange.flashinfer_families import find_family, scheme_of
from rooflab.bench.exchange.flashinfer_files import DataSet, Definition, Trace, digest_text, read_dataset
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark, write_pytest_benchmark
from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.bench.predict.cases import identity
from rooflab.bench.records import files as record_files
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import DeviceType, Record, Status
from rooflab.bench.report.figures import bench_row
from rooflab.bench.report.sources import find_files
from rooflab.bench.report.trends.points import Chosen
from rooflab.kernels.registry import get_kernel

FLASHINFER = "flashinfer-bench"
STATUSES: Mapping[str, Status] = {
    "PASSED": "OK",
    "INCORRECT_SHAPE": "INCORRECT",
    "INCORRECT_NUMERICAL": "INCORRECT",
    "INCORRECT_DTYPE": "INCORRECT",
    "RUNTIME_ERROR": "RUNTIME_ERROR",
    "COMPILE_ERROR": "COMPILE_ERROR",
    "TIMEOUT": "TIMEOUT",
}
"""Their status as ours.  `checked_by` stays `none`: their tolerance passes what ours would not."""


def definition_rows(dataset: DataSet) -> list[dict[str, Any]]:
    """One row per definition: what it is, the op of ours that computes it, or why none does."""
    rows = []
    for definition in dataset.definitions.values():
        family, reason = find_family(definition)
        scheme = scheme_of(definition)[0]
        row = {"definition": definition.name, "op_type": definition.op_type, "op": family.op if family else None}
        row |= {"family": family.name if family else None, "scheme": scheme or None}
        workloads = len(dataset.workloads.get(definition.name, ()))
        results = sum(trace.workload.definition == definition.name for trace in dataset.traces)
        rows.append(row | {"workloads": workloads, "traces": results, "reason": reason})
    return rows


def read_traces(dataset: DataSet) -> Imported:
    """One record per trace; one whose definition is not in the data set is listed with that reason.

    Raises `ValueError` naming file and line of an evaluation that is malformed.
    """
    records, skipped = [], []
    times = [when(get(trace.evaluation, "timestamp", str, trace.place), trace.place) for trace in dataset.traces]
    run = run_id(max(times), digest_text(dataset)) if times else ""
    for trace, timestamp in zip(dataset.traces, times, strict=True):
        definition = dataset.definitions.get(trace.workload.definition)
        if definition is None:
            skipped.append(Skipped(trace.place, f"no definition called {trace.workload.definition!r} is there"))
        else:
            records.append(_trace_record(trace, definition, run, timestamp))
    return Imported(tuple(records), tuple(skipped))


def _trace_record(trace: Trace, definition: Definition, run: str, timestamp: str) -> Record:
    place, evaluation = f"{trace.place}, evaluation", trace.evaluation
    theirs = get(evaluation, "status", str, place)
    if theirs not in STATUSES:
        raise ValueError(f"{place}.status: expected one of {', '.join(STATUSES)}, got {theirs!r}")
    status = STATUSES[theirs]
    family = find_family(definition)[0]
    exact = family.case(definition, trace.workload.axes) if family and family.case else None
    case = exact or make_case({"definition": definition.name, **trace.workload.axes})
    performance = get_object(evaluation, "performance", place)
    latency = None
    if status == "OK":
        number = get(performance, "latency_ms", (int, float), f"{place}.performance")
        latency = positive(number, f"{place}.performance.latency_ms")
    return Record(
        kind="bench",
        run_id=run,
        timestamp=timestamp,
        status=status,
        reason="" if status == "OK" else f"{theirs}: {_first_line(evaluation.get('log'))}",
        environment=_trace_environment(evaluation, place, trace.workload.uuid),
        op=family.op if family else definition.op_type,
        kernel=trace.solution,
        case=dict(case),
        case_id=case.id,
        scheme=scheme_of(definition)[0] or None,
        basis="measured" if status == "OK" else "bound",
        timer=f"imported: {FLASHINFER}",
        latency_median_ms=latency,
        metrics=_trace_metrics(performance, get_object(evaluation, "correctness", place)),
    )


def _first_line(log: object) -> str:
    lines = str(log or "").strip().splitlines()
    return lines[-1].strip() if lines else "no log"


def _trace_environment(evaluation: Mapping[str, Any], place: str, workload: str) -> dict[str, Any]:
    found = get(evaluation, "environment", dict, place)
    hardware = get(found, "hardware", str, f"{place}.environment")
    libs = get_object(found, "libs", f"{place}.environment")
    known = {name: libs.get(name) for name in ("torch", "triton", "numpy")}
    others = {name: version for name, version in libs.items() if name not in known}
    return environment(
        FLASHINFER, hardware, hardware.replace("_", " "), **known, libs=others or None, workload=workload
    )


def _trace_metrics(performance: Mapping[str, Any], correctness: Mapping[str, Any]) -> dict[str, float]:
    """Their numbers beside the latency, as far as they are finite."""
    names = ("reference_latency_ms", "speedup_factor", "max_relative_error", "max_absolute_error")
    both = {**performance, **correctness}
    numbers = {name: both[name] for name in names if isinstance(both.get(name), int | float)}
    return {name: float(cast(float, value)) for name, value in numbers.items() if math.isfinite(value)}


TOOLS = ("pytest-benchmark", "tritonbench", "flashinfer")
FORMS: Mapping[str, Callable[[Sequence[Record], Path], list[Skipped]]] = {
    "pytest-benchmark": write_pytest_benchmark,
    "csv": write_csv,
}
Advance = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What was read."""

    imported: Imported
    definitions: list[dict[str, Any]] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """One row per result."""
        return [bench_row(record) for record in self.imported.records]

    def summary(self) -> dict[str, Any]:
        """Everything as JSON values."""
        skipped = [asdict(each) for each in self.imported.skipped]
        return {"definitions": self.definitions, "rows": self.rows(), "not_imported": skipped}


def read(tool: str, paths: Sequence[Path], ops: Sequence[str] | None = None) -> Found:
    """The results of another tool's files.  Raises `ValueError` on an unknown tool and on a malformed file."""
    if tool not in TOOLS:
        raise ValueError(f"tool: expected one of {', '.join(TOOLS)}, got {tool!r}")
    if tool == "flashinfer":
        dataset = read_dataset(_only(paths))
        rows = [row for row in definition_rows(dataset) if not ops or row["op"] in ops]
        return Found(read_traces(dataset), rows)
    if tool == "tritonbench":
        parts = [read_tritonbench(path, _only(ops) if ops else None) for path in paths]
    else:
        parts = [read_pytest_benchmark(path) for path in paths]
    records = tuple(record for part in parts for record in part.records)
    return Found(Imported(records, tuple(skipped for part in parts for skipped in part.skipped)))


def _only(values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"path: expected one, got {len(values)}")
    return values[0]


def keep(imported: Imported, out: Path | None) -> list[Path]:
    """Writes the records to `out`, where it is given; the files."""
    return write_records(imported.records, out) if out is not None and imported.records else []


def export(form: str, paths: Sequence[Path], to: Path, chosen: Chosen) -> tuple[int, list[Skipped]]:
    """Writes the chosen records to the file `to`; how many they are, and what the form has no place for.

    Raises `ValueError` on an unknown form and where nothing is chosen.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    records = [record for file in find_files(paths) for record in record_files.read(file) if chosen.takes(record)]
    skipped = FORMS[form](records, to)
    return len(records) - len(skipped), skipped


def counted(skipped: Sequence[Skipped]) -> list[tuple[str, int]]:
    """Reasons and how often each is given, most frequent first."""
    return Counter(each.reason for each in skipped).most_common()


def check_options(
    tool: str,
    paths: Sequence[Path],
    run_references: bool,
    ops: Sequence[str] | None,
    kernels: Sequence[str] | None,
    device: str | None,
    seed: int,
    limit: int,
    timeout_s: float,
) -> Options:
    """The options of `--check`.  Raises `ValueError` on any that do not go together, before anything runs."""
    if tool != "flashinfer" or len(paths) != 1:
        raise ValueError(f"check: expected flashinfer and one folder, got {tool} and {len(paths)} paths")
    if not run_references:
        raise ValueError(
            "check: runs the Python text of the definitions in a process of its own, which is no sandbox; "
            "expected --run-references with it"
        )
    if kernels and len(ops or ()) != 1:
        raise ValueError("kernel: expected one --op with it")
    for name in kernels or ():
        get_kernel(str((ops or [""])[0]), name)
    if limit < 0 or not timeout_s > 0:
        raise ValueError(f"limit: expected at least 0 and a timeout above 0, got {limit} and {timeout_s}")
    return Options(tuple(ops or ()), tuple(kernels or ()), pick_device(device), seed, limit, timeout_s)


def count_workloads(dataset: DataSet, options: Options) -> int:
    """How many workloads `run_checks` goes through."""
    return sum(min(own, options.limit or own) for own in _listed(dataset, options).values())


def _listed(dataset: DataSet, options: Options) -> dict[str, int]:
    """Workloads there are of each definition that is checked."""
    found = {}
    for name, definition in dataset.definitions.items():
        family = find_family(definition)[0]
        if family is not None and (not options.ops or family.op in options.ops):
            found[name] = len(dataset.workloads.get(name, ()))
    return found


def run_checks(dataset: DataSet, options: Options, out: Path | None, advance: Advance) -> list[DefinitionCheck]:
    """Checks kernels by the definitions; with `out`, writes a record of each kernel that was checked or failed."""
    writer = RunWriter(out) if out else None
    environment = snapshot(options.device.index or 0) if writer else None
    results = []
    for result in check_definitions(dataset, options, advance):
        results.append(result)
        if writer and environment and result.kernel not in (None, ORACLE):
            writer.write(_record(result, options, writer.run_id, environment))
    return results


def _record(result: DefinitionCheck, options: Options, run_id: str, environment: Any) -> Record:
    kernel = get_kernel(str(result.op), str(result.kernel))
    case = make_case({"definition": result.definition, "workload": result.workload, **result.axes})
    return Record(
        kind="check",
        run_id=run_id,
        status=result.status,
        reason=result.reason,
        **identity(kernel, case, str(result.scheme), environment),
        seed=options.seed,
        device=cast(DeviceType, options.device.type),
        checked_by=result.checked_by,
        errors=tuple(asdict(error) for error in result.errors),
        weak=result.weak,
    )


def check_rows(results: Sequence[DefinitionCheck]) -> list[dict[str, Any]]:
    """One row per kernel and workload, and one per definition or workload that could not be checked."""
    return [
        {
            "definition": result.definition,
            "workload": result.workload,
            "axes": ",".join(f"{name}={size}" for name, size in result.axes.items()),
            "op": result.op,
            "kernel": result.kernel,
            "scheme": result.scheme,
            "status": result.status,
            "checked_by": result.checked_by,
            "worst": max((error.max_error_over_tolerance for error in result.errors), default=None),
            "weak": list(result.weak),
            "not_compared": list(result.not_compared),
            "reason": result.reason,
        }
        for result in results
    ]


def check_notes(dataset: DataSet, options: Options, results: Sequence[DefinitionCheck]) -> list[str]:
    """Sentences below the table: what was counted, and what was left out."""
    judged = [result for result in results if result.kernel is not None]
    right = sum(result.status == "OK" for result in judged)
    wrong = sum(result.status not in ("OK", "UNSUPPORTED", "UNAVAILABLE") for result in results)
    lines = [f"{len(judged)} checks: {right} right, {wrong} wrong, {len(results) - right - wrong} not made"]
    listed = _listed(dataset, options)
    if (total := sum(listed.values())) > (done := count_workloads(dataset, options)):
        lines.append(f"{done} of {total} workloads, the smallest {options.limit} of each definition; --limit 0 for all")
    weak = sorted({f"{result.definition}: {text}" for result in results for text in result.weak})
    lines += [f"not discriminating: {text} would pass" for text in weak]
    outputs = sorted({f"{result.definition}.{name}" for result in results for name in result.not_compared})
    if outputs:
        lines.append(f"not compared, because no op here gives it: {', '.join(outputs)}")
    return lines
