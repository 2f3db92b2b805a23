"""Makes records of step ledgers (times op by op), of studies, and of the effect of another kernel on a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.core import Environment, Record, RunWriter, TimeBasis
from rooflab.bench.latency.ledger import Ledger
from rooflab.bench.latency.study import Lab, Study
from rooflab.bench.latency.whatif import PhaseChange
from rooflab.bench.report.ledgers import CASE_ID


def ledger_record(ledger: Ledger, folder: Path) -> Path:
    """Writes a step ledger (the times op by op) as a record of a new run.  Returns the path of the file."""
    row_bases = {ledger_row.basis for ledger_row in ledger.rows}
    basis: TimeBasis = "measured" if row_bases == {"measured"} else "bound" if row_bases == {"bound"} else "published"
    case: dict[str, Any] = {"model": ledger.model, "dtype": ledger.dtype, "kind": ledger.kind, "batch": ledger.batch}
    case |= {"context": ledger.context, "of": ledger.device}
    case |= {ledger_row.op: ledger_row.kernel for ledger_row in ledger.rows if ledger_row.kernel}
    timer_name = "perf_counter" if ledger.device == "cpu" else "CUDA events"
    run_writer = RunWriter(folder)
    record_fields = {"case": case, "metrics": ledger.metrics(), "timer": timer_name if basis == "measured" else None}
    run_writer.write(_record(run_writer.run_id, ledger.noise, CASE_ID, basis, **record_fields))
    return run_writer.path


def change_records(changes: Sequence[PhaseChange], case: Mapping[str, Any], folder: Path) -> Path:
    """Writes a record for each of `changes` as a new run, and returns the file's path.  A change compares the time of
    an engine step with an old and a new kernel.  `case` describes the model and the step.
    """
    run_writer = RunWriter(folder)
    for kernel_change in changes:
        change_row = kernel_change.row()
        text_fields = {row_key: str(change_row.pop(row_key)) for row_key in ("figure", "op", "before", "after")}
        metrics = {row_key: field_value for row_key, field_value in change_row.items() if field_value is not None}
        time_basis: TimeBasis = "predicted" if kernel_change.measured_ms is None else "measured"
        case_id = f"whatif {kernel_change.op}={kernel_change.after} {kernel_change.figure}"
        record_fields = {"case": {**case, **text_fields}, "metrics": metrics}
        run_writer.write(_record(run_writer.run_id, kernel_change.noise, case_id, time_basis, **record_fields))
    return run_writer.path


def study_record(study: Study, lab: Lab, run_id: str) -> Record:
    """Makes the record of `study`.  It must be the study that `lab` ran last: `lab` keeps only this study's models."""
    model, dtype, device = ("+".join(dict.fromkeys(engine_values)) for engine_values in zip(*lab.engines, strict=True))
    case: dict[str, Any] = {"study": study.name, "model": model, "dtype": dtype, "verdict": study.verdict}
    case |= {"smoke": True} if lab.quick else {}
    metrics = {
        f"{study_row[study.x]}.{column_name}": float(cell_value)
        for study_row in study.rows
        for column_name, cell_value in study_row.items()
        if column_name != study.x and isinstance(cell_value, int | float)
    }
    noise_reason = study.number if study.verdict == "NOISY" else ""
    record_fields = {"case": case, "metrics": metrics, "device": "cuda" if device == "cuda" else "cpu"}
    return _record(run_id, noise_reason, f"study {study.name}", "measured", **record_fields)


def _record(run_id: str, noise: str, case_id: str, basis: TimeBasis, **fields: Any) -> Record:
    """Makes a record of an engine measurement. The default timer of a measured time is the host's clock."""
    return Record(
        kind="engine",
        run_id=run_id,
        status="NOISY" if noise else "OK",
        reason=noise,
        **Environment.now().record_fields(),
        case_id=case_id,
        basis=basis,
        **{"timer": "perf_counter" if basis == "measured" else None, **fields},
    )
