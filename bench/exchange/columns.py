"""Reads a CSV file of any tool.  The caller gives the names and units of its columns."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import number_in
from rooflab.bench.exchange import files
from rooflab.kernels.registry import get_op, ops
from rooflab.reference.spec import scalar
from rooflab.roofline.device import get_device

NAMES = ("op", "kernel", "scheme", "gpu")
FIELD_UNITS: Mapping[str, Mapping[str, float]] = {
    "latency": files.MS,
    "flops": {"flop": 1.0, "mflop": 1e6, "gflop": 1e9, "tflop": 1e12},
    "bytes": {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
}
"""By measured field, the factor of each unit that the field may have."""
ColumnByField = Mapping[str, tuple[str, float]]
"""By field: the name of its column, or `=` and a text for all rows; and the factor of the column's unit."""


def read_columns(path: Path, columns: Sequence[str]) -> files.Imported:
    """Reads a record from each row of a CSV file.  Each text in `columns` maps a field to a column: `op=Name` fills
    `op` from the column `Name`.  Skips rows whose sizes the op refuses.  Raises `ValueError` if a row lacks a cell."""
    csv_text, column_by_field = files.read_text(path), places_of(columns)
    result_file = files.ResultFile("csv", files.file_time(path), csv_text + str(columns), {})
    csv_rows = csv.DictReader(StringIO(csv_text))
    if missing_fields := [name for name in ("op", "kernel", "latency") if name not in column_by_field]:
        raise ValueError(f"column: expected one for {', '.join(missing_fields)}, got {', '.join(columns) or 'none'}")
    for csv_row in csv_rows:
        _add(path, result_file, f"line {csv_rows.line_num}", csv_row, column_by_field)
    if csv_rows.line_num < 2:
        raise ValueError(f"path: expected a line of names and then rows, got {csv_rows.line_num} lines in {path}")
    return result_file.imported()


def places_of(columns: Sequence[str]) -> ColumnByField:
    """Returns the column of each record field, and the factor of its unit.  A text in `columns` has one of three forms:
    FIELD=COLUMN, FIELD=COLUMN:UNIT (a measured field), or FIELD==TEXT (all rows have the same text)."""
    column_by_field = {}
    for text in columns:
        field, _, column = text.partition("=")
        column, _, column_unit = column.rpartition(":") if field in FIELD_UNITS else (column, "", "")
        if field in FIELD_UNITS and column_unit not in FIELD_UNITS[field]:
            raise ValueError(f"column: expected {field}=COLUMN:UNIT, in {', '.join(FIELD_UNITS[field])}, got {text!r}")
        if not column or field in column_by_field or not (field in (*NAMES, *FIELD_UNITS) or field.startswith("case.")):
            field_list = ", ".join((*NAMES, *FIELD_UNITS))
            raise ValueError(f"column: expected FIELD=COLUMN with each once of {field_list} or case.NAME, got {text!r}")
        column_by_field[field] = column, FIELD_UNITS[field][column_unit] if column_unit else 1.0
    return column_by_field


def _add(path: Path, source: files.ResultFile, where: str, row: Mapping[str, Any], places: ColumnByField) -> None:
    """Adds a table row as a record. Skips a row if its op refuses the sizes. Raises `ValueError` on a missing value."""
    cells: dict[str, Any] = {}
    for field, (column_name, unit_factor) in places.items():
        cell = column_name[1:] if column_name.startswith("=") else row.get(column_name)
        parsed_number = number_in(str(cell), f"{path.name}, {where}, {field}") if field in FIELD_UNITS else None
        if cell is None or None in row or (field in FIELD_UNITS and parsed_number is None):
            expected_text = f"a {'number' if field in FIELD_UNITS else 'cell'} in column {column_name!r}"
            raise ValueError(
                f"{path.name}, {where}: expected {expected_text}, got {cell!r} in {', '.join(map(str, row))}"
            )
        cells[field] = cell if parsed_number is None else parsed_number * unit_factor
    params = {name[5:]: scalar(str(cell)) for name, cell in cells.items() if name.startswith("case.") and cell != ""}
    op_case = files.make_case(params)
    try:
        op_case = get_op(cells["op"]).check_case(op_case) if op_case and cells["op"] in ops() else op_case
    except ValueError as error:
        source.skip(where, str(error))
        return
    latency: float = cells["latency"]
    flops, moved_bytes, gpu_name = cells.get("flops"), cells.get("bytes"), cells.get("gpu")
    with suppress(ValueError):  # the GPU is none of those that `--gpu` knows
        gpu_name = gpu_name and get_device(gpu_name).full_name
    values = {name: cells.get(name) for name in ("op", "kernel", "scheme", "flops")} | {"least_bytes": moved_bytes}
    if latency:
        values["flops_per_s"], values["bytes_per_s"] = (work and work / latency * 1e3 for work in (flops, moved_bytes))
    values["environment"] = files.environment(source.tool, gpu_name or "unknown", gpu_name, file=path.name)
    source.add(f"{path.name}, {where}", op_case, latency, values)
