"""Implements the commands `rooflab import` and `rooflab export`, without their printed output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rooflab.bench.core import read as read_records
from rooflab.bench.exchange.columns import read_columns
from rooflab.bench.exchange.files import Imported, Skipped
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark, write_pytest_benchmark
from rooflab.bench.report.figures import bench_row
from rooflab.bench.report.sources import find_files
from rooflab.bench.report.trends.points import RecordFilter

FORMATS: Mapping[str, Callable[[Path, Sequence[str]], Imported]] = {
    "pytest-benchmark": lambda path, columns: read_pytest_benchmark(path),
    "csv": read_columns,
}
"""By format, the function that reads files of this format; its second argument is the texts of `--column`."""


def read(tool: str, paths: Sequence[Path], columns: Sequence[str] = ()) -> Imported:
    """Reads the results in another tool's files.  Raises `ValueError` on an unknown tool or a malformed file.

    A reader is an entry point of the group `rooflab.readers`: a function that takes paths and returns an `Imported`."""
    reader_plugins = {entry_point.name: entry_point for entry_point in entry_points(group="rooflab.readers")}
    if tool not in (*FORMATS, *reader_plugins):
        raise ValueError(f"tool: expected one of {', '.join((*FORMATS, *reader_plugins))} or published, got {tool!r}")
    if columns and tool != "csv":
        raise ValueError(f"column: expected none with {tool}, got {columns[0]!r}")
    if not paths:
        raise ValueError(f"path: expected a file of {tool}, got none")
    if tool in FORMATS:
        return sum((FORMATS[tool](result_path, columns) for result_path in paths), Imported())
    imported_data: Imported = reader_plugins[tool].load()(paths)
    return imported_data


def summary(imported: Imported) -> dict[str, Any]:
    """Returns an import as JSON: the data set's kernel definitions, the records as rows, and the skipped parts."""
    skipped_rows = [asdict(skip_note) for skip_note in imported.skipped]
    record_rows = [bench_row(imported_record) for imported_record in imported.records]
    return {"definitions": imported.definitions, "rows": record_rows, "not_imported": skipped_rows}


def export(form: str, paths: Sequence[Path], to: Path, chosen: RecordFilter) -> tuple[int, list[Skipped]]:
    """Writes the chosen records to `to`.  Returns the number of written records, and the records that were skipped.

    Raises `ValueError` on an unknown format `form`, or if no record is chosen."""
    if form != "pytest-benchmark":
        raise ValueError(f"form: expected pytest-benchmark, got {form!r}")
    chosen_records = [record for file in find_files(paths) for record in read_records(file) if chosen.takes(record)]
    skipped_records = write_pytest_benchmark(chosen_records, to)
    return len(chosen_records) - len(skipped_records), skipped_records
