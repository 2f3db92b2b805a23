"""Records as CSV, one row each, a column per field of the schema, and back again without loss.

Texts stand as they are, everything else as JSON (numbers, `true`, lists, objects); an empty cell is a field's default.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rooflab.bench.exchange.exported import replace_file
from rooflab.bench.exchange.imported import Imported, parse_json, read_text
from rooflab.bench.records.record import Record

COLUMNS = tuple(field.name for field in fields(Record))
"""In the schema's order; a later minor version adds columns and moves none to another name."""
EMPTY_TEXT = '""'
"""A text that is empty where the default is another."""


def _is_text(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_is_text(part) for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return any(isinstance(value, str) for value in get_args(hint))
    return hint is str


_TEXTS = frozenset(name for name, hint in get_type_hints(Record).items() if _is_text(hint))
_EMPTY_BY_DEFAULT = frozenset(field.name for field in fields(Record) if field.default == "")


def write_csv(records: Sequence[Record], path: Path) -> None:
    """Writes every record, whatever its kind or status.  Raises `ValueError` on none."""
    if not records:
        raise ValueError("records: expected at least one, got none")
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        values = json.loads(record.to_json())
        writer.writerow([_cell(name, values[name]) for name in COLUMNS])
    replace_file(path, text.getvalue())


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if name in _TEXTS:
        return EMPTY_TEXT if value == "" and name not in _EMPTY_BY_DEFAULT else str(value)
    return json.dumps(value, separators=(",", ":"))


def read_csv(path: Path) -> Imported:
    """The records of a file that `write_csv` wrote.  Raises `ValueError` naming file, line and column of a fault."""
    lines = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    records = []
    try:
        for row in lines:
            place = f"{path.name}, line {lines.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{place}: expected {len(lines.fieldnames or ())} cells")
            values = {name: _value(name, cell, place) for name, cell in row.items() if cell != ""}
            records.append(_record(values, place))
    except csv.Error as error:
        raise ValueError(f"{path.name}, line {lines.line_num + 1}: not CSV: {error}") from error
    if not records:
        raise ValueError(f"{path.name}: expected a row of column names and one per record, got none")
    return Imported(tuple(records))


def _value(name: str, cell: str, place: str) -> Any:
    if name in _TEXTS:
        return "" if cell == EMPTY_TEXT else cell
    return parse_json(cell, f"{place}, {name}")


def _record(values: Mapping[str, Any], place: str) -> Record:
    try:
        return Record.from_json(json.dumps(values))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
