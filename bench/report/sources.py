"""Records, each with its file and line, and the choice of the current record of each key.

A `Source` traces each number of a report back to its record.  The newest record of each machine, op, kernel, case and
scheme is current.  This module also says which times of records may be published.
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
    """The source of a number: a file and a line."""

    file: str
    """The path as the caller gave it, or the last two parts of an absolute path."""
    file_number: int
    line: int
    run_id: str

    @property
    def label(self) -> str:
        """The end of the run's id, and the line; the label is short enough for a table."""
        return f"{self.run_id.rsplit('-', 1)[-1][-8:]}:{self.line}"


@dataclass(frozen=True)
class Located:
    """A record with its source."""

    record: Record
    source: Source
    configs: int = 1
    """For a chosen record: the number of its run's configurations.  The record is the fastest of them."""
    counted: Source | None = None
    """For a chosen record: the profile that gives its traffic, if this profile is another record."""


@dataclass(frozen=True)
class FileInfo:
    """A file that was read."""

    number: int
    name: str
    records: int
    run_ids: tuple[str, ...]


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The given files, and every `*.jsonl` at any depth below the given folders, each file once.

    Raises `ValueError` on a path that is neither a file nor a folder, and if there is no file at all.
    """
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
    """Reads all records in files and folders; returns them, oldest first, and the files.  A repeated line counts once.

    Raises `ValueError` with file and line if a line is damaged, and if there is no record at all.
    """
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
                    checked = whole(record)
                except ValueError as error:
                    raise ValueError(f"{path.name}, line {line}: {error}") from error
                new_items.append(Located(checked, Source(display_name(path), number, line, record.run_id)))
        runs = tuple(dict.fromkeys(item.record.run_id for item in new_items))
        files.append(FileInfo(number, display_name(path), len(new_items), runs))
        located += new_items
    if not located:
        raise ValueError(f"records: expected at least one, found none in {', '.join(map(str, paths))}")
    order = sorted(located, key=lambda item: (item.record.timestamp, item.source.file_number, item.source.line))
    return order, files


def display_name(path: Path) -> str:
    """`path` as given, or the last two parts of an absolute path, because the rest depends on the machine."""
    return "/".join(path.parts[-2:]) if path.is_absolute() else path.as_posix()


def whole(record: Record) -> Record:
    """Returns `record` without its samples, which no report shows.

    Raises `ValueError` if the record's GPU or ceilings lack a value that a page needs, or have one of another type.
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
    """The key of the machine, with the device if the key does not contain it.  On a CPU also torch's number of threads,
    if it is not the number of processors: one core has other ceilings than the whole machine."""
    key = str(record.environment.get("machine_key") or "unnamed machine")
    usual = "cuda" if record.environment.get("gpu") else "cpu"
    threads = record.environment.get("threads")
    some = (record.device or usual) == "cpu" and threads not in (None, record.environment.get("cores"))
    name = key if record.device in (None, usual) else f"{key} ({record.device})"
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}" if some else name


def kernel_key(record: Record) -> tuple[str, str, str, str, str]:
    """The machine, op, kernel, case and scheme of a record."""
    return (
        machine_of(record),
        record.op or "no op",
        record.kernel or "no kernel",
        record.case_id or "no case",
        record.scheme or "no scheme",
    )


def latency_ms(record: Record) -> float | None:
    """The median in ms, if it may be published: the record is OK, and the clock is fine enough for the time."""
    latency = record.latency_median_ms
    if record.status != "OK" or latency is None or not isfinite(latency) or latency <= 0:
        return None
    return latency


def fault(record: Record) -> tuple[str, str] | None:
    """The status and reason of a failed record, or of a record with an impossible time.  None for other records."""
    if record.status not in FINE:
        return record.status, record.reason
    if record.status == "OK" and record.latency_median_ms is not None and latency_ms(record) is None:
        return "INVALID", f"its time is {record.latency_median_ms} ms"
    return None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups items by key.  Keys and items keep the order in which they occur."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def newest(items: Iterable[Located], key: Callable[[Record], Hashable]) -> list[Located]:
    """The last item of each key, in the order in which the keys first occur; `items` are oldest first."""
    return list({key(item.record): item for item in items}.values())


def benches_of(located: Iterable[Located]) -> list[Located]:
    """The bench records that a ladder may show.  A/B readings are left out: half are of another revision, or slowed."""
    return [item for item in located if item.record.stands_alone]


def choose(benches: Sequence[Located]) -> list[Located]:
    """The newest bench record of each machine, op, kernel, case and scheme; a profile only if there is no other record.

    If a run timed several configurations, as a search does, the record of the fastest correct configuration is taken.
    """
    chosen = []
    for whole in grouped(benches, lambda item: kernel_key(item.record)).values():
        by_kind = grouped(whole, lambda item: item.record.status == "OK" and item.record.latency_median_ms is None)
        # A profile gives the traffic of a kernel, not its time: Nsight Compute counts under its own clock.
        group, profiles = by_kind.get(False, whole), by_kind.get(True, [])
        run = [item for item in group if item.record.run_id == group[-1].record.run_id]
        configs = {str(item.record.config) for item in run}
        timed = [(time, item) for item in run if (time := latency_ms(item.record)) is not None]
        last = min(timed, key=lambda pair: pair[0])[1] if len(configs) > 1 and timed else group[-1]
        chosen.append(_with_counted(replace(last, configs=len(configs)), profiles))
    return chosen


def _code_of(record: Record) -> tuple[object, ...]:
    """The values that identify the code: the commit, or else the tree's hash, and the hash of an outside file."""
    return record.commit, *(record.environment.get(name) for name in ("tree", "kernel_file_sha256"))


def _with_counted(chosen: Located, profiles: Sequence[Located]) -> Located:
    """Returns `chosen` with the traffic that a hardware profile of the same code and config counted, if any."""
    base, latency, code = chosen.record, latency_ms(chosen.record), _code_of(chosen.record)
    if base.dirty or not any(code) or latency is None or base.traffic_basis == "counted":
        return chosen
    for item in reversed(profiles):
        profile, moved = item.record, item.record.traffic_bytes or 0.0
        same = not profile.dirty and (_code_of(profile), profile.config) == (code, base.config)
        if profile.traffic_basis == "counted" and moved > 0 and same:
            intensity, rate = (base.flops or 0.0) / moved, moved / latency * 1e3
            counted = replace(base, traffic_bytes=moved, intensity=intensity, bytes_per_s=rate, traffic_basis="counted")
            return replace(chosen, record=counted, counted=item.source)
    return chosen
