"""The work of `rooflab import` and `rooflab export`, without the display of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.exchange.columns import read_columns, read_nvbench
from rooflab.bench.exchange.files import Imported, Skipped, write_csv, write_records
from rooflab.bench.exchange.flashinfer import read_dataset
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark, write_pytest_benchmark
from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.bench.report.figures import bench_row
from rooflab.bench.report.sources import find_files
from rooflab.bench.report.trends.points import RecordFilter

TOOLS = ("pytest-benchmark", "tritonbench", "flashinfer", "nvbench", "csv")
FORMS: Mapping[str, Callable[[Sequence[Record], Path], list[Skipped]]] = {
    "pytest-benchmark": write_pytest_benchmark,
    "csv": write_csv,
}


@dataclass(frozen=True)
class ReadResults:
    """The results and definitions that were read."""

    imported: Imported
    definitions: list[dict[str, Any]] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """One row per result."""
        return [bench_row(record) for record in self.imported.records]

    def summary(self) -> dict[str, Any]:
        """Definitions, rows and skipped results as JSON values."""
        skipped = [asdict(each) for each in self.imported.skipped]
        return {"definitions": self.definitions, "rows": self.rows(), "not_imported": skipped}


def read(
    tool: str, paths: Sequence[Path], ops: Sequence[str] | None = None, columns: Sequence[str] = ()
) -> ReadResults:
    """Reads the results in another tool's files.  Raises `ValueError` on an unknown tool or a malformed file."""
    if tool not in TOOLS:
        raise ValueError(f"tool: expected one of {', '.join(TOOLS)} or published, got {tool!r}")
    if columns and tool not in ("csv", "nvbench"):
        raise ValueError(f"column: expected none with {tool}, got {columns[0]!r}")
    if not paths:
        raise ValueError(f"path: expected a file of {tool}, got none")
    if tool == "flashinfer":
        dataset = read_dataset(_only(paths))
        return ReadResults(dataset.records(), [row for row in dataset.rows() if not ops or row["op"] in ops])
    if tool == "tritonbench":
        parts = [read_tritonbench(path, _only(ops) if ops else None) for path in paths]
    elif tool in ("csv", "nvbench"):
        parts = [(read_columns if tool == "csv" else read_nvbench)(path, columns) for path in paths]
    else:
        parts = [read_pytest_benchmark(path) for path in paths]
    records = tuple(record for part in parts for record in part.records)
    return ReadResults(Imported(records, tuple(skipped for part in parts for skipped in part.skipped)))


def _only(values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"path: expected one, got {len(values)}")
    return values[0]


def keep(imported: Imported, out: Path | None) -> list[Path]:
    """Writes the records to the folder `out`, if it is given; returns the paths of the files."""
    return write_records(imported.records, out) if out is not None and imported.records else []


def export(form: str, paths: Sequence[Path], to: Path, chosen: RecordFilter) -> tuple[int, list[Skipped]]:
    """Writes the chosen records to the file `to`; returns the number written, and the records that `form` cannot hold.

    Raises `ValueError` on an unknown form, or if no record is chosen.
    """
    if form not in FORMS:
        raise ValueError(f"form: expected one of {', '.join(FORMS)}, got {form!r}")
    records = [record for file in find_files(paths) for record in record_files.read(file) if chosen.takes(record)]
    skipped = FORMS[form](records, to)
    return len(records) - len(skipped), skipped
