"""flashinfer-bench traces as records, and its definitions as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from rooflab.bench.exchange.flashinfer_families import find_family
from rooflab.bench.exchange.flashinfer_files import DataSet, Definition, Trace, digest_text
from rooflab.bench.exchange.flashinfer_forms import scheme_of
from rooflab.bench.exchange.imported import (
    Imported,
    Skipped,
    environment,
    get,
    get_object,
    make_case,
    positive,
    run_id,
    when,
)
from rooflab.bench.records.record import Record, Status

TOOL = "flashinfer-bench"
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
            records.append(_record(trace, definition, run, timestamp))
    return Imported(tuple(records), tuple(skipped))


def _record(trace: Trace, definition: Definition, run: str, timestamp: str) -> Record:
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
        environment=_environment(evaluation, place, trace.workload.uuid),
        op=family.op if family else definition.op_type,
        kernel=trace.solution,
        case=dict(case),
        case_id=case.id,
        scheme=scheme_of(definition)[0] or None,
        basis="measured" if status == "OK" else "bound",
        timer=f"imported: {TOOL}",
        latency_median_ms=latency,
        metrics=_metrics(performance, get_object(evaluation, "correctness", place)),
    )


def _first_line(log: object) -> str:
    lines = str(log or "").strip().splitlines()
    return lines[-1].strip() if lines else "no log"


def _environment(evaluation: Mapping[str, Any], place: str, workload: str) -> dict[str, Any]:
    found = get(evaluation, "environment", dict, place)
    hardware = get(found, "hardware", str, f"{place}.environment")
    libs = get_object(found, "libs", f"{place}.environment")
    known = {name: libs.get(name) for name in ("torch", "triton", "numpy")}
    others = {name: version for name, version in libs.items() if name not in known}
    return environment(TOOL, hardware, hardware.replace("_", " "), **known, libs=others or None, workload=workload)


def _metrics(performance: Mapping[str, Any], correctness: Mapping[str, Any]) -> dict[str, float]:
    """Their numbers beside the latency, as far as they are finite."""
    names = ("reference_latency_ms", "speedup_factor", "max_relative_error", "max_absolute_error")
    both = {**performance, **correctness}
    numbers = {name: both[name] for name in names if isinstance(both.get(name), int | float)}
    return {name: float(cast(float, value)) for name, value in numbers.items() if math.isfinite(value)}
