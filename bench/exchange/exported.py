"""What every exporter shares: which records it takes, what they are called, and writing a file whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rooflab.bench.exchange.imported import Skipped
from rooflab.bench.records.record import Record


def timed(records: Sequence[Record]) -> tuple[list[Record], list[Skipped]]:
    """The records that are a time of something, and the others with their reason.

    Raises `ValueError` where none is.
    """
    chosen, skipped = [], []
    for record in records:
        if record.kind != "bench":
            skipped.append(Skipped(benchmark_name(record), f"of kind {record.kind}, not bench"))
        elif record.status != "OK" or record.latency_median_ms is None:
            reason = record.reason or "it has no latency"
            skipped.append(Skipped(benchmark_name(record), f"{record.status}: {reason}"))
        elif "pair" in record.metrics:
            skipped.append(Skipped(benchmark_name(record), "one process of an A/B, whose verdict is in its own record"))
        else:
            chosen.append(record)
    if not chosen:
        raise ValueError(f"records: expected a bench record with a latency, got none among {len(records)}")
    return chosen, skipped


def benchmark_name(record: Record) -> str:
    """`gemm/packed M=64,N=48,K=32 fp32`."""
    work = "/".join(part for part in (record.op, record.kernel) if part) or record.kind
    return " ".join(part for part in (work, record.case_id, record.scheme) if part)


def check_one_machine(records: Sequence[Record]) -> None:
    """Raises `ValueError` where the records are of no machine or of several, for a format that has room for one."""
    machines = dict.fromkeys(str(record.environment.get("machine_key")) for record in records)
    if len(machines) != 1:
        raise ValueError(
            f"machine: expected records of one, got {', '.join(machines) or 'none'}; choose with --machine"
        )


def replace_file(path: Path, text: str) -> None:
    """Writes `text` to `path`, whole or not at all; makes the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
