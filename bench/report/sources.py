"""Records together with the file and the line that each came from, so that every number can be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from rooflab.bench.records import files as record_files
from rooflab.bench.records.record import Record
from rooflab.roofline.model import CeilingKind

_NOT_FINITE = ("nan", "inf", "-inf")
"""How a record writes the numbers that JSON lacks."""


@dataclass(frozen=True)
class Source:
    """Where a number comes from."""

    file: str
    """As it was named, or the last two parts of an absolute path."""
    file_number: int
    line: int
    run_id: str

    @property
    def label(self) -> str:
        """The end of the run's id and the line: short enough for a table."""
        return f"{self.run_id.rsplit('-', 1)[-1][-8:]}:{self.line}"


@dataclass(frozen=True)
class Located:
    """One record, where it stands, and when it was made."""

    record: Record
    source: Source
    time: datetime


@dataclass(frozen=True)
class FileInfo:
    """One file that was read."""

    number: int
    name: str
    records: int
    run_ids: tuple[str, ...]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and every `*.jsonl` at any depth below the folders named, each once.

    Raises `ValueError` on a path that is neither, and where there is no file at all.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"records: expected a file or folder, got {str(path)!r}")
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            found.setdefault(file.resolve(), file)
    if not found:
        raise ValueError(f"records: expected *.jsonl files, found none in {', '.join(map(str, paths))}")
    return list(found.values())


def load(paths: Sequence[Path]) -> tuple[list[Located], list[FileInfo]]:
    """Every record of the files and folders, oldest first, and the files.  A line that is there twice counts once.

    Raises `ValueError` with file and line where one is damaged, and where there is no record at all.
    """
    located: list[Located] = []
    files: list[FileInfo] = []
    seen: set[str] = set()
    for number, path in enumerate(find_files(paths), 1):
        own: list[Located] = []
        for line, text, record in _lines(path):
            if text not in seen:
                seen.add(text)
                own.append(_locate(record, path, number, line))
        runs = tuple(dict.fromkeys(item.record.run_id for item in own))
        files.append(FileInfo(number, display_name(path), len(own), runs))
        located += own
    if not located:
        raise ValueError(f"records: expected at least one, found none in {', '.join(map(str, paths))}")
    return sorted(located, key=lambda item: (item.time, item.source.file_number, item.source.line)), files


def display_name(path: Path) -> str:
    """`path` as it was given; of an absolute one the last two parts, because the rest is the machine's."""
    return "/".join(path.parts[-2:]) if path.is_absolute() else path.as_posix()


def _lines(path: Path) -> list[tuple[int, str, Record]]:
    records = record_files.read(path)  # judges the whole file, the cut-off last line included
    with path.open(encoding="utf-8", errors="replace") as lines:
        texts = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    return [(number, text, record) for (number, text), record in zip(texts, records, strict=True)]


def _locate(record: Record, path: Path, number: int, line: int) -> Located:
    try:
        checked = typed(record)
        time = datetime.fromisoformat(checked.timestamp)
    except ValueError as error:
        raise ValueError(f"{path.name}, line {line}: {error}") from error
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    return Located(checked, Source(display_name(path), number, line, checked.run_id), time)


_HINTS = get_type_hints(Record)


def typed(record: Record) -> Record:
    """`record` with `nan` and `inf` as numbers again.

    Raises `ValueError` on a field of another type than the schema's: the reader of a line does not look at all, and a
    page must not be made from half of a record.
    """
    values = {item.name: _value(item.name, _HINTS[item.name], getattr(record, item.name)) for item in fields(Record)}
    _check_environment(values["environment"])
    if values["ceilings"] is not None:
        _check_ceilings(values["ceilings"])
    return replace(record, **values)


def _value(name: str, hint: Any, value: Any) -> Any:
    choices = [choice for choice in get_args(hint) if choice is not NoneType] if NoneType in get_args(hint) else [hint]
    if value is None and NoneType in get_args(hint):
        return None
    origin = get_origin(choices[0]) or choices[0]
    if choices[0] is float:
        return _number(name, value)
    if choices[0] in (int, bool, str) and type(value) is not choices[0]:
        raise ValueError(f"{name}: expected {choices[0].__name__}, got {value!r}")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}: expected an object, got {value!r}")
        if get_args(choices[0])[1] is float:
            return {key: _number(f"{name}.{key}", item) for key, item in value.items()}
    if origin is tuple:
        inner = get_args(choices[0])[0]
        return tuple(_value(name, inner, item) for item in value)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return value


def _check_environment(environment: Mapping[str, Any]) -> None:
    key, gpu = environment.get("machine_key"), environment.get("gpu")
    if not isinstance(key, str | None):
        raise ValueError(f"environment.machine_key: expected a text, got {key!r}")
    if not isinstance(gpu, Mapping | None):
        raise ValueError(f"environment.gpu: expected an object, got {gpu!r}")


def _check_ceilings(ceilings: Mapping[str, Any]) -> None:
    rates = ceilings.get("tensor_flops_per_s")
    if not isinstance(rates, Mapping):
        raise ValueError(f"ceilings.tensor_flops_per_s: expected an object, got {rates!r}")
    wanted = {name: ceilings.get(name) for name in ("hbm_bytes_per_s", "vector_flops_per_s")}
    for name, rate in {**wanted, **rates}.items():
        if not _number(f"ceilings.{name}", rate) > 0:
            raise ValueError(f"ceilings.{name}: expected above 0, got {rate!r}")
    if ceilings.get("kind") not in get_args(CeilingKind):
        raise ValueError(
            f"ceilings.kind: expected one of {', '.join(get_args(CeilingKind))}, got {ceilings.get('kind')!r}"
        )
    if not isinstance(ceilings.get("device"), str):
        raise ValueError(f"ceilings.device: expected a text, got {ceilings.get('device')!r}")
