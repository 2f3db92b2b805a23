"""Records of ledgers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rooflab.bench.latency.ledger import Ledger
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import RunWriter
from rooflab.bench.records.record import Basis, Record
from rooflab.bench.report.ledgers import CASE_ID


def ledger_record(ledger: Ledger, folder: Path) -> Path:
    """Writes a ledger as a record of a new run; returns its path."""
    measured = all(row.basis == "measured" for row in ledger.rows)
    basis: Basis = "measured" if measured else "predicted"
    writer = RunWriter(folder)
    case: dict[str, Any] = {"model": ledger.model, "dtype": ledger.dtype, "kind": ledger.kind, "batch": ledger.batch}
    kernels = {row.op: row.kernel for row in ledger.rows if row.kernel}
    writer.write(
        Record(
            kind="engine",
            run_id=writer.run_id,
            status="OK",
            **snapshot().record_fields(),
            case_id=CASE_ID,
            case={**case, "context": ledger.context, "of": ledger.device, **kernels},
            basis=basis,
            timer="perf_counter" if measured else None,
            metrics=ledger.metrics(),
        )
    )
    return writer.path
