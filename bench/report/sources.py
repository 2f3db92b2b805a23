"""Records, each with its file and line, and the choice of the current record of each key.

Its `Source` traces every number of a report.  The newest record of each machine, op, kernel, case and scheme is
current; this module also says what its time means.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from rooflab.bench.base.plain import number_of
from rooflab.bench.core import NOT_RUN, Record, read
from rooflab.roofline.model import CeilingKind


@dataclass(frozen=True)
class Source:
    """Where a number comes from."""

    file: str
    """The path as the caller gave it, or the last two parts of an absolute path."""
    file_number: int
    line: int
    run_id: str

    @property
    def label(self) -> str:
        """The end of the run's id and the line: short enough for a table."""
        return f"{self.run_id.rsplit('-', 1)[-1][-8:]}:{self.line}"


@dataclass(frozen=True)
class Located:
    """One record, its source, and the time when it was made."""

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
    """The given files, and every `*.jsonl` at any depth below the given folders, each once.

    Raises `ValueError` on a path that is neither a file nor a folder, and if there is no file at all.
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
    """Every record of the files and folders, oldest first, and the files.  A repeated line counts once.

    Raises `ValueError` with file and line if a line is damaged, and if there is no record at all.
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
    """`path` as given; for an absolute path the last two parts, because the rest depends on the machine."""
    return "/".join(path.parts[-2:]) if path.is_absolute() else path.as_posix()


def _lines(path: Path) -> list[tuple[int, str, Record]]:
    records = read(path)  # judges the whole file, including an incomplete last line
    with path.open(encoding="utf-8", errors="replace") as lines:
        texts = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    return [(number, text, record) for (number, text), record in zip(texts, records, strict=True)]


def _locate(record: Record, path: Path, number: int, line: int) -> Located:
    try:
        checked = whole(record)
    except ValueError as error:
        raise ValueError(f"{path.name}, line {line}: {error}") from error
    source = Source(display_name(path), number, line, checked.run_id)
    return Located(checked, source, datetime.fromisoformat(checked.timestamp))


def whole(record: Record) -> Record:
    """`record` without its samples, which no report shows.

    Raises `ValueError` if its GPU or its ceilings are not what a page needs of them.
    """
    gpu = record.environment.get("gpu")
    if not isinstance(gpu, Mapping | None):
        raise ValueError(f"environment.gpu: expected an object, got {gpu!r}")
    if record.ceilings is not None:
        _check_ceilings(record.ceilings)
    return replace(record, samples=None)


def _check_ceilings(ceilings: Mapping[str, Any]) -> None:
    rates = ceilings.get("tensor_flops_per_s")
    if not isinstance(rates, Mapping):
        raise ValueError(f"ceilings.tensor_flops_per_s: expected an object, got {rates!r}")
    wanted = {name: ceilings.get(name) for name in ("hbm_bytes_per_s", "vector_flops_per_s")}
    for name, rate in {**wanted, **rates}.items():
        if not number_of(f"ceilings.{name}", rate) > 0:
            raise ValueError(f"ceilings.{name}: expected above 0, got {rate!r}")
    if ceilings.get("kind") not in get_args(CeilingKind):
        raise ValueError(f"ceilings.kind: expected {', '.join(get_args(CeilingKind))}, got {ceilings.get('kind')!r}")
    if not isinstance(ceilings.get("device"), str):
        raise ValueError(f"ceilings.device: expected a text, got {ceilings.get('device')!r}")


FINE = ("OK", *NOT_RUN)
NOT_WRONG = (*FINE, "NOISY")
"""A NOISY time is no ground for a ratio, and its kernel is right."""


@dataclass(frozen=True)
class BestRecord:
    """The current record of its key, and the number of its run's configurations among which it was the fastest."""

    located: Located
    configs: int = 1
    counted: Source | None = None
    """The profile that gives its traffic, if that is another record."""

    @property
    def record(self) -> Record:
        """The record itself."""
        return self.located.record

    @property
    def source(self) -> Source:
        """Its file and line."""
        return self.located.source


def machine_of(record: Record) -> str:
    """The machine's key, the device if the key does not name it, and on a CPU torch's threads if they are not as many
    as its processors: a core and a machine have other ceilings."""
    key = str(record.environment.get("machine_key") or "unnamed machine")
    usual = "cuda" if record.environment.get("gpu") else "cpu"
    threads = record.environment.get("threads")
    some = (record.device or usual) == "cpu" and threads not in (None, record.environment.get("cores"))
    name = key if record.device in (None, usual) else f"{key} ({record.device})"
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}" if some else name


def kernel_key(record: Record) -> tuple[str, str, str, str, str]:
    """Machine, op, kernel, case and scheme."""
    return (
        machine_of(record),
        record.op or "no op",
        record.kernel or "no kernel",
        record.case_id or "no case",
        record.scheme or "no scheme",
    )


def latency_ms(record: Record) -> float | None:
    """The median that may be published: the record is OK, and a clock can show the time."""
    latency = record.latency_median_ms
    if record.status != "OK" or latency is None or not isfinite(latency) or latency <= 0:
        return None
    return latency


def fault(record: Record) -> tuple[str, str] | None:
    """Status and reason of a failed record, or of one whose time is impossible; otherwise None."""
    if record.status not in FINE:
        return record.status, record.reason
    if record.status == "OK" and record.latency_median_ms is not None and latency_ms(record) is None:
        return "INVALID", f"its time is {record.latency_median_ms} ms"
    return None


def newest(items: Iterable[Located], key: Callable[[Record], Hashable]) -> list[Located]:
    """The last item of each key, in the order in which the keys first occur; `items` are oldest first."""
    found: dict[Hashable, Located] = {}
    for item in items:
        found[key(item.record)] = item
    return list(found.values())


def benches_of(located: Iterable[Located]) -> list[Located]:
    """The bench records that may stand in a ladder; not A/B readings: half are of another revision, or slowed."""
    return [item for item in located if item.record.stands_alone]


def _is_profile(record: Record) -> bool:
    """Whether the record gives a kernel's traffic and not its time: Nsight Compute counts under its own clock."""
    return record.status == "OK" and record.latency_median_ms is None


def choose(benches: Sequence[Located]) -> list[BestRecord]:
    """The newest bench record of each machine, op, kernel, case and scheme; a profile only if there is no other record.

    If its run timed several configurations, as a search does, the fastest correct configuration.
    """
    groups: dict[Hashable, list[Located]] = {}
    for item in benches:
        groups.setdefault(kernel_key(item.record), []).append(item)
    chosen = []
    for whole in groups.values():
        group = [item for item in whole if not _is_profile(item.record)] or whole
        last = group[-1]
        run = [item for item in group if item.record.run_id == last.record.run_id]
        configs = {str(item.record.config) for item in run}
        timed = [(time, item) for item in run if (time := latency_ms(item.record)) is not None]
        if len(configs) > 1 and timed:
            last = min(timed, key=lambda pair: pair[0])[1]
        chosen.append(_with_counted(BestRecord(last, len(configs)), whole))
    return chosen


def _code_of(record: Record) -> tuple[object, ...]:
    """What names the code that ran: the commit, or else the tree's hash, and the hash of an outside file."""
    return record.commit, *(record.environment.get(name) for name in ("tree", "kernel_file_sha256"))


def _with_counted(chosen: BestRecord, group: Sequence[Located]) -> BestRecord:
    """`chosen`, with the traffic that a hardware profile counted for this very code and config, if there is one."""
    own = chosen.record
    profiles = [
        item
        for item in group
        if _is_profile(item.record)
        and item.record.traffic_basis == "counted"
        and (item.record.traffic_bytes or 0) > 0
        and not item.record.dirty
        and (_code_of(item.record), item.record.config) == (_code_of(own), own.config)
    ]
    latency = latency_ms(own)
    if not profiles or own.dirty or not any(_code_of(own)) or latency is None or own.traffic_basis == "counted":
        return chosen
    moved = profiles[-1].record.traffic_bytes
    assert moved, "asked above"
    counted = replace(
        own,
        traffic_bytes=moved,
        traffic_basis="counted",
        intensity=(own.flops or 0.0) / moved,
        bytes_per_s=moved / latency * 1e3,
    )
    return replace(chosen, located=replace(chosen.located, record=counted), counted=profiles[-1].source)
