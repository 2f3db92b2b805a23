"""Reads records with their file and line, and chooses the newest record of each kernel.

A `Source` traces each number of a report back to its record.  The newest record of each machine, op, kernel, case and
scheme is the current record.  This module also decides which times of records may be published.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TypeVar

from rooflab.bench.base.decode import decoded
from rooflab.bench.core import NOT_RUN, Record, read
from rooflab.roofline.model import Ceilings

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Source:
    """Describes the source of a number: a file and a line."""

    file: str
    """The path as the caller gave it, or the last two parts of an absolute path."""
    file_number: int
    line: int
    run_id: str

    @property
    def label(self) -> str:
        """Returns the end of the run's id and the line number.  The label is short enough for a table."""
        return f"{self.run_id.rsplit('-', 1)[-1][-8:]}:{self.line}"


@dataclass(frozen=True)
class Located:
    """Holds a record with its source."""

    record: Record
    source: Source
    configs: int = 1
    """For a chosen record: the number of its run's configurations.  The record is the fastest of them."""
    counted: Source | None = None
    """For a chosen record: the profile that gives its traffic, if this profile is another record."""


@dataclass(frozen=True)
class FileInfo:
    """Describes a file that was read."""

    number: int
    name: str
    records: int
    run_ids: tuple[str, ...]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the given files, and every `*.jsonl` file at any depth below the given folders.  Each file occurs once.

    Raises `ValueError` on a path that is neither a file nor a folder, and if no file was found."""
    files: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"records: expected a file or folder, got {str(path)!r}")
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            files.setdefault(file.resolve(), file)
    if not files:
        raise ValueError(f"records: expected *.jsonl files, found none in {', '.join(map(str, paths))}")
    return list(files.values())


def load(paths: Sequence[Path]) -> tuple[list[Located], list[FileInfo]]:
    """Reads all records in files and folders.  Returns the records, oldest first, and the files.  A repeated line
    counts once.

    Raises `ValueError` on a damaged line, with its file and number, and if there is no record."""
    located: list[Located] = []
    files: list[FileInfo] = []
    known_lines: set[str] = set()
    for number, path in enumerate(find_files(paths), 1):
        records = read(path)  # checks the whole file, including an incomplete last line
        lines = enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1)
        texts = [(line, text.strip()) for line, text in lines if text.strip()]
        new_items: list[Located] = []
        for (line, text), record in zip(texts, records, strict=True):
            if text not in known_lines:
                known_lines.add(text)
                try:
                    checked_record = whole(record)
                except ValueError as error:
                    raise ValueError(f"{path.name}, line {line}: {error}") from error
                new_items.append(Located(checked_record, Source(display_name(path), number, line, record.run_id)))
        runs = tuple(dict.fromkeys(item.record.run_id for item in new_items))
        files.append(FileInfo(number, display_name(path), len(new_items), runs))
        located += new_items
    if not located:
        raise ValueError(f"records: expected at least one, found none in {', '.join(map(str, paths))}")
    order = sorted(located, key=lambda item: (item.record.timestamp, item.source.file_number, item.source.line))
    return order, files


def display_name(path: Path) -> str:
    """Returns `path`, or the last two parts of an absolute path, because the rest depends on the machine."""
    return "/".join(path.parts[-2:]) if path.is_absolute() else path.as_posix()


def whole(record: Record) -> Record:
    """Returns `record` without its samples, which no report shows.

    Raises `ValueError` if a value that a page needs is missing or has the wrong type in the record's GPU or ceilings.
    """
    gpu = record.environment.get("gpu")
    if not isinstance(gpu, Mapping | None):
        raise ValueError(f"environment.gpu: expected an object, got {gpu!r}")
    if record.ceilings is not None:
        ceilings = decoded(Ceilings, record.ceilings, "ceilings")
        for rate in (ceilings.hbm_bytes_per_s, ceilings.vector_flops_per_s, *ceilings.tensor_flops_per_s.values()):
            if not rate > 0:
                raise ValueError(f"ceilings: expected rates above 0, got {rate!r}")
    return replace(record, samples=None)


FINE = ("OK", *NOT_RUN)
NOT_WRONG = (*FINE, "NOISY")
"""The statuses of right kernels.  The time of a NOISY record may not be used in a ratio."""


def machine_of(record: Record) -> str:
    """Returns the key of the machine.  The device is added if the key does not contain it.  On a CPU, torch's number of
    threads is added if it differs from the number of processors, because other ceilings apply."""
    key = str(record.environment.get("machine_key") or "unnamed machine")
    usual = "cuda" if record.environment.get("gpu") else "cpu"
    threads = record.environment.get("threads")
    names_threads = (record.device or usual) == "cpu" and threads not in (None, record.environment.get("cores"))
    name = key if record.device in (None, usual) else f"{key} ({record.device})"
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}" if names_threads else name


def kernel_key(record: Record) -> tuple[str, str, str, str, str]:
    """Returns the machine, op, kernel, case and scheme of a record."""
    return (
        machine_of(record),
        record.op or "no op",
        record.kernel or "no kernel",
        record.case_id or "no case",
        record.scheme or "no scheme",
    )


def latency_ms(record: Record) -> float | None:
    """Returns the median time in ms if it may be published: the record is OK, and the time is positive."""
    latency = record.latency_median_ms
    if record.status != "OK" or latency is None or not isfinite(latency) or latency <= 0:
        return None
    return latency


def fault(record: Record) -> tuple[str, str] | None:
    """Returns status and reason of a record that failed or has an impossible time.  Else returns None."""
    if record.status not in FINE:
        return record.status, record.reason
    if record.status == "OK" and record.latency_median_ms is not None and latency_ms(record) is None:
        return "INVALID", f"its time is {record.latency_median_ms} ms"
    return None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups items by key.  The keys, and the items of a key, keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def newest(items: Iterable[Located], key: Callable[[Record], Hashable]) -> list[Located]:
    """Returns the last item of each key, in the order of the keys.  `items` must be sorted, oldest first."""
    return list({key(item.record): item for item in items}.values())


def benches_of(located: Iterable[Located]) -> list[Located]:
    """Returns the bench records for tables, without A/B records: half of them are of another revision, or slowed."""
    return [item for item in located if item.record.stands_alone]


def choose(benches: Sequence[Located]) -> list[Located]:
    """Returns the newest bench record of each machine, op, kernel, case and scheme.  A hardware profile is returned
    only if there is no other record.

    If a run timed several configurations, as a search does, the record of the fastest correct configuration is
    returned."""
    current = []
    for key_items in grouped(benches, lambda item: kernel_key(item.record)).values():
        by_kind = grouped(key_items, lambda item: item.record.status == "OK" and item.record.latency_median_ms is None)
        # A profile gives the traffic of a kernel, not its time: Nsight Compute counts under its own clock.
        group, profiles = by_kind.get(False, key_items), by_kind.get(True, [])
        run = [item for item in group if item.record.run_id == group[-1].record.run_id]
        configs = {str(item.record.config) for item in run}
        timed = [(time, item) for item in run if (time := latency_ms(item.record)) is not None]
        last = min(timed, key=lambda pair: pair[0])[1] if len(configs) > 1 and timed else group[-1]
        current.append(_with_counted(replace(last, configs=len(configs)), profiles))
    return current


def _code_of(record: Record) -> tuple[object, ...]:
    """Returns values that identify the code: commit or else tree hash, and the hash of an outside kernel file."""
    return record.commit, *(record.environment.get(name) for name in ("tree", "kernel_file_sha256"))


def _with_counted(chosen: Located, profiles: Sequence[Located]) -> Located:
    """Returns `chosen` with the traffic that a profile of the same code and config counted, if there is one."""
    base, latency, code = chosen.record, latency_ms(chosen.record), _code_of(chosen.record)
    if base.dirty or not any(code) or latency is None or base.traffic_basis == "counted":
        return chosen
    for item in reversed(profiles):
        profile, total = item.record, item.record.traffic_bytes or 0.0
        same_code = not profile.dirty and (_code_of(profile), profile.config) == (code, base.config)
        if profile.traffic_basis == "counted" and total > 0 and same_code:
            intensity, rate = (base.flops or 0.0) / total, total / latency * 1e3
            counted = replace(base, traffic_bytes=total, intensity=intensity, bytes_per_s=rate, traffic_basis="counted")
            return replace(chosen, record=counted, counted=item.source)
    return chosen
