"""Makes the results of a load run: its record (one JSON line), its exit status and the path of its trace file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rooflab.bench.core import Environment, Record, Status
from rooflab.bench.load.metrics import broken, failures, noise, summarize
from rooflab.bench.load.trace import Trace


def record_of(trace: Trace, limits: Mapping[str, float], run_id: str) -> Record:
    """Makes the record of a load run.  The record describes the client's machine, not the server's machine."""
    metrics, failure_reason, noise_reason = summarize(trace, limits), broken(trace), noise(trace)
    has_answers = metrics["requests"] > metrics["failed"]
    run_status: Status = "RUNTIME_ERROR" if failure_reason else "NOISY" if noise_reason else "OK"
    goodput_limits = {f"goodput_{name}_ms": limit_ms for name, limit_ms in limits.items()}
    case_values = {name: case_value for name, case_value in trace.case.items() if name != "seed"}
    return Record(
        kind="engine",
        run_id=run_id,
        status=run_status,
        reason=failure_reason or noise_reason,
        **Environment.now().record_fields(),
        case_id="load",
        case={**case_values, **goodput_limits},
        seed=trace.case.get("seed"),
        basis="measured" if has_answers else "bound",
        timer="perf_counter",
        metrics=metrics,
    )


def exit_status(trace: Trace) -> str:
    """Returns the exit status of a load run: OK, NOISY, or RUNTIME_ERROR if a request failed."""
    return "RUNTIME_ERROR" if failures(trace) or broken(trace) else "NOISY" if noise(trace) else "OK"


def trace_file(folder: Path, name: str) -> Path:
    """Returns the path of a trace file: `trace.ndjson`, or `trace-<rate>.ndjson` if the command tests several rates."""
    return folder / (f"trace-{name}.ndjson" if name else "trace.ndjson")
