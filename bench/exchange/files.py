"""Contains code that importers and exporters share: parsing with errors that name the file, and making of records."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import in_utc
from rooflab.bench.core import Environment, Record
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, Scalar

MS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
"""The milliseconds in each unit of time that another tool may write."""


@dataclass(frozen=True)
class Skipped:
    """Describes a part of a file that did not become a record, or a record that was not exported."""

    place: str
    reason: str


@dataclass(frozen=True)
class Imported:
    """Holds the records from files, the files' skipped parts, and a data set's definitions (what kernels compute)."""

    records: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    definitions: tuple[Mapping[str, Any], ...] = ()

    def __add__(self, other: Imported) -> Imported:
        return Imported(
            self.records + other.records, self.skipped + other.skipped, self.definitions + other.definitions
        )


@dataclass(frozen=True)
class ResultFile:
    """Collects the records and the skipped parts of one file.  Holds the values that all these records share."""

    tool: str
    timestamp: str
    content: str
    """The hash of the file's content, which distinguishes two files of the same time."""
    environment: Mapping[str, Any]
    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def imported(self, definitions: Sequence[Mapping[str, Any]] = ()) -> Imported:
        """Returns the records and the skipped parts of the file.  `definitions` are those of the data set, if any."""
        return Imported(tuple(self.records), tuple(self.skipped), tuple(definitions))

    def skip(self, place: str, reason: str) -> None:
        """Records that the part `place` of the file is skipped, and the reason."""
        self.skipped.append(Skipped(place, reason))

    def finite(self, values: Mapping[str, Any], place: str) -> dict[str, float]:
        """Returns the finite numbers of `values`.  Records any other value as skipped: a record cannot hold it."""
        finite_numbers = {}
        for field_name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                finite_numbers[field_name] = float(value)
            else:
                self.skip(place, f"its {field_name} is {value}")
        return finite_numbers

    def add(self, place: str, case: Case, latency_ms: float | None, values: Mapping[str, Any]) -> None:
        """Adds a benchmark record with the given case and latency.  `values` are the record's additional fields.  An
        impossible latency makes the record INVALID.

        A second import of the same file makes the same records.  Raises `ValueError` if a value does not fit its field.
        The message begins with `place`, the place in the file."""
        run_datetime = datetime.fromisoformat(self.timestamp)
        record_fields: dict[str, Any] = {
            "run_id": f"{run_datetime:%Y%m%dT%H%M%SZ}-{hashlib.sha256(self.content.encode()).hexdigest()[:8]}",
            "timestamp": self.timestamp,
            "environment": self.environment,
            "timer": f"imported: {self.tool}",
            "status": "OK",
            "basis": "bound" if latency_ms is None else "measured",
            "latency_median_ms": latency_ms,
            "case": dict(case),
            "case_id": case.id,
        } | {**values}
        if latency_ms is not None and not is_time(latency_ms):
            record_fields |= {"status": "INVALID", "reason": f"a latency of {latency_ms:g} ms", "basis": "bound"}
            record_fields |= dict.fromkeys(("latency_median_ms", "flops_per_s", "bytes_per_s"))
        try:
            self.records.append(Record(kind="bench", **record_fields))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def is_time(latency_ms: float) -> bool:
    """Returns whether a number is a possible time of a kernel."""
    return math.isfinite(latency_ms) and latency_ms > 0


def read_text(path: Path) -> str:
    """Reads the text of a file.  Raises `ValueError` if the file does not exist or is not UTF-8."""
    if not path.is_file():
        raise ValueError(f"{path.name}: expected a file, got {str(path)!r}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name}, byte {error.start}: expected UTF-8 text") from error


def parse_json(text: str, place: str) -> Any:
    """Returns the value of a JSON text.  An integer that is too large for a float becomes infinity.

    Raises `ValueError` with `place` and the line and column of an error in the text."""
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))
    except json.JSONDecodeError as error:
        error_position = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"{place}, {error_position}: not JSON: {error.msg}") from error


def environment(tool: str, hardware: str, gpu: str | None = None, **values: Any) -> dict[str, Any]:
    """Returns the environment of another tool's run, with the keys of a record's environment.  Unknown values are None.

    `hardware` is the machine's name in the file, and `gpu` is the name of its GPU.  The machine key begins with
    `imported-`, so that imported results are always recognised.
    """
    hardware_slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-") or "unknown"
    key_parts = (hardware, gpu, values.get("driver"), *([values["cores"]] if values.get("cores") else []))
    gpu_details = {"name": gpu, "driver": values.pop("driver", None)} if gpu else None
    known_fields = {item.name: values.pop(item.name, None) for item in fields(Environment)}
    return known_fields | {
        "machine_key": f"imported-{hardware_slug}-{hashlib.sha256(repr(key_parts).encode()).hexdigest()[:8]}",
        "gpu": gpu_details,
        "imported": {"tool": tool, **{field_name: value for field_name, value in values.items() if value is not None}},
    }


def when(value: object, place: str) -> str:
    """Converts a time to a record's form: UTC, ISO 8601, to the second.  Raises `ValueError` on any other format."""
    try:
        return datetime.fromisoformat(in_utc(str(value))).isoformat(timespec="seconds")
    except ValueError as error:
        raise ValueError(f"{place}: expected a time in ISO 8601, got {value!r}") from error


def file_time(path: Path) -> str:
    """Returns the time at which a file was last written, for formats that contain no time."""
    return datetime.fromtimestamp(int(path.stat().st_mtime), UTC).isoformat(timespec="seconds")


_ESCAPE_TABLE = str.maketrans({"%": "%25", ",": "%2C", "=": "%3D"})


def make_case(values: Mapping[str, Any]) -> Case:
    """Returns a tool's parameters as a case (names and values).  In values, `,`, `=`, `%` become `%2C`, `%3D`, `%25`.

    This keeps the text parsable.  Characters that a name cannot have become `_`.  A repeated name gets a final `_`."""
    case_params: dict[str, Scalar] = {}
    for param_name, param_value in values.items():
        new_name = re.sub(r"\W", "_", param_name) or "_"
        new_name = new_name if new_name.isidentifier() else f"_{new_name}"
        while new_name in case_params:
            new_name += "_"
        scalar_value = param_value if isinstance(param_value, Scalar) else str(param_value)
        case_params[new_name] = scalar_value.translate(_ESCAPE_TABLE) if isinstance(scalar_value, str) else scalar_value
    return Case(**case_params)


def write_records(records: Iterable[Record], folder: Path) -> list[Path]:
    """Writes one file `<run_id>.jsonl` for each run, and returns the paths.  Each file is written atomically.

    Raises `ValueError` if one of the files already exists: its run was imported before."""
    text_by_path: dict[Path, str] = {}
    for record in records:
        record_path = Path(folder) / f"{record.run_id}.jsonl"
        text_by_path[record_path] = f"{text_by_path.get(record_path, '')}{record.to_json()}\n"
    for record_path in text_by_path:
        if record_path.exists():
            raise ValueError(f"out: {record_path.name} is there already, so this was imported before")
    return [write_whole(record_path, file_text) for record_path, file_text in text_by_path.items()]


def benchmark_name(record: Record) -> str:
    """Returns the name of a record's benchmark, such as `gemm/packed M=64,N=48,K=32 fp32`."""
    name_prefix = "/".join(name_part for name_part in (record.op, record.kernel) if name_part) or record.kind
    return " ".join(name_part for name_part in (name_prefix, record.case_id, record.scheme) if name_part)
