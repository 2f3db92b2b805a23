"""What compiled code holds: registers, spills, occupancy, tensor-core and TMA instructions, whatever a record says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.records.record import Record
from rooflab.bench.report.newest import FINE, newest
from rooflab.bench.report.sources import Located, Source
from rooflab.bench.report.words import digits, plain_value

_FIRST = (
    *("name", "target", "findings", "registers", "spill", "stack", "shared", "threads", "num_warps", "num_stages"),
    *("ctas_per_sm", "occupancy", "limiter", "grid", "ctas", "waves", "full_waves", "tail_ctas", "wave", "tail"),
    *("tensor_path", "wgmma", "mma", "tma", "cp_async", "ldmatrix", "loop", "counts", "load", "store"),
    *("warp_special", "tf32", "options", "asked", "launches", "device"),
)
"""The columns' order: a key comes at its own place, else at the first word that it holds; an unknown one comes last."""
_BAD_WORDS = ("spill", "stack", "findings")
_LONGEST, _MOST = 240, 12


@dataclass(frozen=True)
class Cell:
    """One value, and whether it is one to look at: registers spilled to memory."""

    text: str
    warn: bool = False
    number: bool = False


@dataclass(frozen=True)
class CompiledRow:
    """One launched kernel of one kernel of an op."""

    kernel: str
    case_id: str
    scheme: str
    config: str
    status: str
    reason: str
    failed: bool
    cells: tuple[Cell, ...]
    predicted: str
    source: Source


@dataclass(frozen=True)
class CompiledTable:
    """The rows of one op, with the columns that any of them has."""

    op: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    """Whether a column holds numbers."""
    rows: tuple[CompiledRow, ...]


def compiled_tables(located: Sequence[Located]) -> tuple[CompiledTable, ...]:
    """One table an op, from the newest record with compiled code of each kernel, case, scheme, config and target."""
    holding = [item for item in located if item.record.compiled or item.record.kind == "static"]
    current = newest(holding, _key)
    tables = []
    for op in sorted({item.record.op or "no op" for item in current}):
        own = [item for item in current if (item.record.op or "no op") == op]
        flat = [(item, dict(flatten(launched))) for item in own for launched in item.record.compiled or ({},)]
        keys = sorted(dict.fromkeys(key for _, values in flat for key in values), key=_rank)
        rows = tuple(_row(item, values, keys) for item, values in flat)
        numeric = tuple(any(row.cells[place].number for row in rows) for place in range(len(keys)))
        tables.append(CompiledTable(op, tuple(key.replace("_", " ") for key in keys), numeric, rows))
    return tuple(tables)


def _key(record: Record) -> tuple[str, ...]:
    target = str(record.compiled[0].get("target")) if record.compiled else ""
    return (record.op or "", record.kernel or "", record.case_id or "", record.scheme or "", str(record.config), target)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values; an object of numbers, such as counts of instructions, is one value, another is opened."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and not all(isinstance(item, int | float) for item in value.values()):
            yield from flatten(value, f"{name} ")
        else:
            yield name, value


def _rank(key: str) -> tuple[int, int]:
    if key in _FIRST:
        return 0, _FIRST.index(key)
    held = [place for place, word in enumerate(_FIRST) if word in key]
    return (0, held[0]) if held else (1, 0)


def _row(item: Located, values: Mapping[str, Any], keys: Sequence[str]) -> CompiledRow:
    record = item.record
    predicted = ""
    if record.predicted_ms is not None:
        error = record.prediction_error
        predicted = f"{digits(record.predicted_ms * 1e3, 4)} µs, " + (
            "uncalibrated" if error is None else f"held-out error {100 * error:.0f}%"
        )
    return CompiledRow(
        kernel=record.kernel or "no kernel",
        case_id=record.case_id or "",
        scheme=record.scheme or "",
        config=plain_value(record.config) if record.config else "",
        status=record.status,
        reason=record.reason,
        failed=record.status not in FINE,
        cells=tuple(_cell(key, values.get(key)) for key in keys),
        predicted=predicted,
        source=item.source,
    )


def _cell(key: str, value: Any) -> Cell:
    if value is None:
        return Cell("")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, list | tuple) and value and all(isinstance(size, int) for size in value):
        return Cell("×".join(map(str, value)), number=True)
    bad = any(word in key for word in _BAD_WORDS)
    return Cell(_text(value), bad and (value > 0 if number else bool(value)), number)


def _text(value: Any) -> str:
    """A value in one line that a table has room for."""
    if isinstance(value, Mapping):
        shown = plain_value(dict(list(value.items())[:_MOST]))
        return f"{shown} and {len(value) - _MOST} more" if len(value) > _MOST else shown
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "; ".join(_option(item) if isinstance(item, Mapping) else plain_value(item) for item in value)
    text = plain_value(value)
    if len(text) == 64 and all(letter in "0123456789abcdef" for letter in text):
        return text[:12]
    return text if len(text) <= _LONGEST else f"{len(text):,} characters"


def _option(option: Mapping[str, Any]) -> str:
    """What was asked of the compiler, by name where it has one, and whether it took no effect."""
    if "name" not in option:
        return plain_value(option)
    return f"{option['name']}{': no effect' if option.get('took_effect') is False else ''}"
