"""Makes records of step ledgers (times op by op), of studies, and of the effect of another kernel on a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.core import Environment, Record, RunWriter
from rooflab.bench.latency.ledger import Ledger
from rooflab.bench.latency.study import Lab, Study
from rooflab.bench.latency.whatif import PhaseChange
from rooflab.bench.report.ledgers import CASE_ID

Basis = Literal["measured", "predicted", "published", "bound"]
"""The source of a record's times."""


def ledger_record(ledger: Ledger, folder: Path) -> Path:
    """Writes a step ledger (the times op by op) as a record of a new run.  Returns the path of the file."""
    bases = {row.basis for row in ledger.rows}
    basis: Basis = "measured" if bases == {"measured"} else "bound" if bases == {"bound"} else "published"
    case: dict[str, Any] = {"model": ledger.model, "dtype": ledger.dtype, "kind": ledger.kind, "batch": ledger.batch}
    case |= {"context": ledger.context, "of": ledger.device}
    case |= {row.op: row.kernel for row in ledger.rows if row.kernel}
    timer_name = "perf_counter" if ledger.device == "cpu" else "CUDA events"
    writer = RunWriter(folder)
    record_fields = {"case": case, "metrics": ledger.metrics(), "timer": timer_name if basis == "measured" else None}
    writer.write(_record(writer.run_id, ledger.noise, CASE_ID, basis, **record_fields))
    return writer.path


def change_records(changes: Sequence[PhaseChange], case: Mapping[str, Any], folder: Path) -> Path:
    """Writes a record for each of `changes` of a step's time by another kernel, as a new run.  Returns the file's path.
    `case` describes the model and the step.
    """
    writer = RunWriter(folder)
    for change in changes:
        row = change.row()
        text_fields = {name: str(row.pop(name)) for name in ("figure", "op", "before", "after")}
        metrics = {name: value for name, value in row.items() if value is not None}
        basis: Basis = "predicted" if change.measured_ms is None else "measured"
        case_id = f"whatif {change.op}={change.after} {change.figure}"
        record_fields = {"case": {**case, **text_fields}, "metrics": metrics}
        writer.write(_record(writer.run_id, change.noise, case_id, basis, **record_fields))
    return writer.path


def study_record(study: Study, lab: Lab, run_id: str) -> Record:
    """Makes the record of `study`.  It must be the study that `lab` ran last: `lab` keeps only this study's models."""
    model, dtype, device = ("+".join(dict.fromkeys(names)) for names in zip(*lab.engines, strict=True))
    case: dict[str, Any] = {"study": study.name, "model": model, "dtype": dtype, "verdict": study.verdict}
    case |= {"smoke": True} if lab.quick else {}
    metrics = {
        f"{row[study.x]}.{column}": float(value)
        for row in study.rows
        for column, value in row.items()
        if column != study.x and isinstance(value, int | float)
    }
    noise_reason = study.number if study.verdict == "NOISY" else ""
    record_fields = {"case": case, "metrics": metrics, "device": "cuda" if device == "cuda" else "cpu"}
    return _record(run_id, noise_reason, f"study {study.name}", "measured", **record_fields)


def _record(run_id: str, noise: str, case_id: str, basis: Basis, **fields: Any) -> Record:
    """Makes a record of the engine.  If `fields` has no `timer`, the timer of measured times is the host's clock."""
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
