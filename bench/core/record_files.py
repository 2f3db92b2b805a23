"""Reads and writes files of records.  Each run has one file, and each record is one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rooflab.bench.core.record import Record, new_run_id
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import check_writable


def write(path: Path, *records: Record) -> None:
    """Appends records to the file `path`.  Lines of two writers never mix, and no line is written in part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file_descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for record in records:
            record_line = f"{record.to_json()}\n".encode()
            written_bytes = os.write(file_descriptor, record_line)  # one call for a line
            if written_bytes != len(record_line):
                os.ftruncate(file_descriptor, os.lseek(file_descriptor, 0, os.SEEK_CUR) - written_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(file_descriptor)


def read(path: Path, deep: bool = False) -> list[Record]:
    """Returns all records of a file, or of a folder's `*.jsonl` files sorted by path.  `deep` includes subfolders.

    Raises `ValueError` with file and line on a truncated or unreadable record, and if the path does not exist."""
    path = Path(path)
    if path.is_dir():
        files = path.rglob("*.jsonl") if deep else path.glob("*.jsonl")
        return [record for record_file in sorted(files) for record in _read_file(record_file)]
    if not path.is_file():
        raise ValueError(f"records: expected a file or folder, got {str(path)!r}")
    return list(_read_file(path))


def read_all(folder: Path) -> list[Record]:
    """Returns all records of a folder and its subfolders."""
    return read(folder, deep=True)


def _read_file(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8", errors="replace") as file_lines:
        for line_number, json_line in enumerate(file_lines, 1):
            if not json_line.strip():
                continue
            if not json_line.endswith("\n"):
                raise ValueError(f"{path.name}, line {line_number}: the last record is truncated")
            try:
                yield Record.from_json(json_line)
            except ValueError as error:
                raise ValueError(f"{path.name}, line {line_number}: {error}") from error


class RunWriter:
    """Writes the records of a run to its own file, `<folder>/<run_id>.jsonl`.  So two git branches merge easily.

    With `part`, the file is `<run_id><part>.jsonl`.  Its records may have longer run ids,
    such as `<run_id>-first-0A`."""

    def __init__(self, folder: Path, run_id: str | None = None, part: str = ""):
        self.run_id, self._part = run_id or new_run_id(), part
        self.path = Path(folder) / f"{self.run_id}{part}.jsonl"

    def write(self, *records: Record) -> None:
        """Appends `records` to the file.  Raises `ValueError` on a record of another run."""
        for record in records:
            if record.run_id != self.run_id and not (self._part and record.run_id.startswith(f"{self.run_id}-")):
                raise ValueError(f"run_id: expected {self.run_id!r}, got {record.run_id!r}")
        write(self.path, *records)

    @classmethod
    def going_on(cls, folder: Path) -> tuple[RunWriter, list[Record]]:
        """Returns a writer for the newest run in `folder`, and its records.  An empty folder gets a new run.

        Removes the last line of the file if a killed process has left this line unfinished."""
        files = sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
        if not files:
            return cls(folder), []
        file_text = files[-1].read_text(errors="replace")
        if not file_text.endswith("\n"):
            write_whole(files[-1], file_text[: file_text.rfind("\n") + 1])
        return cls(folder, files[-1].stem), read(files[-1])


FolderKind = Literal["kept", "local", "new"]


def result_folder(place: FolderKind = "new") -> Path:
    """Returns the folder for results of the kind `place`.

    `kept` (committed records) is `results` in a checkout of Rooflab, else `.rooflab`.  `local` (ignored by git) is
    `results/local` in a checkout, else `.rooflab`.  `new` is a folder inside `local`, named by the time.  Raises
    `ValueError` if the folder cannot be made."""
    is_checkout = Path("bench/core/record_files.py").is_file()
    if place == "kept":
        return Path("results" if is_checkout else ".rooflab")
    folder = Path("results/local" if is_checkout else ".rooflab")
    if place == "local":
        return folder
    check_writable("out", folder)
    if not is_checkout:
        write_whole(folder / ".gitignore", "*\n")
    return folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
