"""Records of ledgers, of swaps and of studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.core.environment import snapshot
from rooflab.bench.core.record import Basis, Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.latency.ledger import Ledger
from rooflab.bench.latency.study import Lab, Study
from rooflab.bench.latency.whatif import PhaseChange
from rooflab.bench.report.ledgers import CASE_ID


def ledger_record(ledger: Ledger, folder: Path) -> Path:
    """Writes a ledger as a record of a new run; returns its path."""
    bases = {row.basis for row in ledger.rows}
    basis: Basis = "measured" if bases == {"measured"} else "bound" if bases == {"bound"} else "published"
    writer = RunWriter(folder)
    case: dict[str, Any] = {"model": ledger.model, "dtype": ledger.dtype, "kind": ledger.kind, "batch": ledger.batch}
    kernels = {row.op: row.kernel for row in ledger.rows if row.kernel}
    writer.write(
        Record(
            kind="engine",
            run_id=writer.run_id,
            status="NOISY" if ledger.noise else "OK",
            reason=ledger.noise,
            **snapshot().record_fields(),
            case_id=CASE_ID,
            case={**case, "context": ledger.context, "of": ledger.device, **kernels},
            basis=basis,
            timer=None if basis != "measured" else "perf_counter" if ledger.device == "cpu" else "CUDA events",
            metrics=ledger.metrics(),
        )
    )
    return writer.path


def change_records(changes: Sequence[PhaseChange], case: Mapping[str, Any], folder: Path) -> Path:
    """Writes what other kernels change as records of a new run; returns its path.  `case`: the model and the step."""
    writer = RunWriter(folder)
    fields = snapshot().record_fields()
    for one in changes:
        row = one.row()
        words = {name: str(row.pop(name)) for name in ("figure", "op", "before", "after")}
        writer.write(
            Record(
                kind="engine",
                run_id=writer.run_id,
                status="NOISY" if one.noise else "OK",
                reason=one.noise,
                **fields,
                case_id=f"whatif {one.op}={one.after} {one.figure}",
                case={**case, **words},
                basis="predicted" if one.measured_ms is None else "measured",
                timer=None if one.measured_ms is None else "perf_counter",
                metrics={name: value for name, value in row.items() if value is not None},
            )
        )
    return writer.path


def study_record(study: Study, lab: Lab, run_id: str) -> Record:
    """What came out of the study that the lab ran last."""
    model, dtype, device = ("+".join(dict.fromkeys(names)) for names in zip(*lab.engines, strict=True))
    case: dict[str, Any] = {"study": study.name, "model": model, "dtype": dtype, "verdict": study.verdict}
    return Record(
        kind="engine",
        run_id=run_id,
        status="NOISY" if study.verdict == "NOISY" else "OK",
        reason=study.number if study.verdict == "NOISY" else "",
        **snapshot().record_fields(),
        case_id=f"study {study.name}",
        case=case | ({"smoke": True} if lab.quick else {}),
        device="cuda" if device == "cuda" else "cpu",
        basis="measured",
        timer="perf_counter",
        metrics={name: number for row in study.rows for name, number in _numbers(row).items()},
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by column, after the first columns up to one that is no text: `decode 4.step_ms`."""
    columns = list(row)
    first = next(place for place, name in enumerate(columns) if not isinstance(row[name], str)) + 1
    label = " ".join(str(row[name]) for name in columns[:first])
    return {f"{label}.{name}": float(row[name]) for name in columns[first:] if isinstance(row[name], int | float)}
