"""Reads records with their file and line, and chooses the newest record of each kernel.

A `Source` traces each number of a report back to its record.  Each machine, op, kernel, case and scheme (dtypes) has
its own newest record.  This module also decides which times a report may show.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TypeVar

from rooflab.bench.base.decode import decoded
from rooflab.bench.base.plain import Row
from rooflab.bench.core import NOT_RUN, Record, read
from rooflab.roofline.model import Ceilings

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Source:
    """Describes where a number of a report comes from: a file and a line."""

    file: str
    """The path as the caller gave it, or the last two parts of an absolute path."""
    file_number: int
    line: int
    run_id: str

    @property
    def label(self) -> str:
        """Returns a short label for a table: the end of the run's id, and the line number."""
        return f"{self.run_id.rsplit('-', 1)[-1][-8:]}:{self.line}"


@dataclass(frozen=True)
class Located:
    """Holds a record, and the file and line that it comes from."""

    record: Record
    source: Source
    configs: int = 1
    """For a chosen record: the number of its run's configurations.  The record is the fastest of them."""
    counted: Source | None = None
    """For a chosen record: the profile that gives its traffic, if this profile is another record."""


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the given files, and every `*.jsonl` file at any depth below the given folders.  No file occurs twice.

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


def load(paths: Sequence[Path]) -> tuple[list[Located], list[Row]]:
    """Reads files and folders.  Returns their records, oldest first, and the files.  A repeated line counts once.

    Raises `ValueError` if there is no record.  Also raises it on a damaged line, with the file and the line number."""
    items: list[Located] = []
    files: list[Row] = []
    seen_lines: set[str] = set()
    for file_number, path in enumerate(find_files(paths), 1):
        records = read(path)  # checks the whole file, including an incomplete last line
        lines = enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1)
        nonempty_lines = [(line, line_text.strip()) for line, line_text in lines if line_text.strip()]
        new_items: list[Located] = []
        for (line, line_text), record in zip(nonempty_lines, records, strict=True):
            if line_text not in seen_lines:
                seen_lines.add(line_text)
                try:
                    checked_record = whole(record)
                except ValueError as error:
                    raise ValueError(f"{path.name}, line {line}: {error}") from error
                new_items.append(Located(checked_record, Source(display_name(path), file_number, line, record.run_id)))
        run_ids = tuple(dict.fromkeys(item.record.run_id for item in new_items))
        file_row = {"number": file_number, "name": display_name(path), "records": len(new_items), "run_ids": run_ids}
        files.append(file_row)
        items += new_items
    if not items:
        raise ValueError(f"records: expected at least one, found none in {', '.join(map(str, paths))}")
    time_sorted = sorted(items, key=lambda item: (item.record.timestamp, item.source.file_number, item.source.line))
    return time_sorted, files


def display_name(path: Path) -> str:
    """Returns `path`, or its last two parts if it is absolute.  The other parts depend on the machine."""
    return "/".join(path.parts[-2:]) if path.is_absolute() else path.as_posix()


def whole(record: Record) -> Record:
    """Checks that the GPU and the ceilings of a record are whole (valid).  Returns the record without its samples.

    Raises `ValueError` on an invalid value.  A report shows no samples."""
    gpu = record.environment.get("gpu")
    if not isinstance(gpu, Mapping | None):
        raise ValueError(f"environment.gpu: expected an object, got {gpu!r}")
    if record.ceilings is not None:
        ceilings = decoded(Ceilings, record.ceilings, "ceilings")
        for rate in (ceilings.hbm_bytes_per_s, ceilings.vector_flops_per_s, *ceilings.tensor_flops_per_s.values()):
            if not rate > 0:
                raise ValueError(f"ceilings: expected rates above 0, got {rate!r}")
    return replace(record, samples=None)


FINE_STATUSES = ("OK", *NOT_RUN)
NOT_WRONG_STATUSES = (*FINE_STATUSES, "NOISY")
"""The statuses of right kernels.  The time of a NOISY record may not be used in a ratio."""


def machine_of(record: Record) -> str:
    """Returns the name of the machine on which a record was measured.  The name is the record's `machine_key`.  It also
    contains the device of a CPU measurement on a machine with a GPU.  It contains the number of CPU threads if this is
    not the number of cores, because threads change the ceilings."""
    key = str(record.environment.get("machine_key") or "unnamed machine")
    usual_device = "cuda" if record.environment.get("gpu") else "cpu"
    threads = record.environment.get("threads")
    shows_threads = (record.device or usual_device) == "cpu" and threads not in (None, record.environment.get("cores"))
    name = key if record.device in (None, usual_device) else f"{key} ({record.device})"
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}" if shows_threads else name


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
    """Returns the median time in ms if the record is OK and the time is positive, else None."""
    median_ms = record.latency_median_ms
    if record.status != "OK" or median_ms is None or not isfinite(median_ms) or median_ms <= 0:
        return None
    return median_ms


def fault(record: Record) -> tuple[str, str] | None:
    """Returns the status and the reason if a record failed or its time is not positive.  Otherwise returns None."""
    if record.status not in FINE_STATUSES:
        return record.status, record.reason
    if record.status == "OK" and record.latency_median_ms is not None and latency_ms(record) is None:
        return "INVALID", f"its time is {record.latency_median_ms} ms"
    return None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups items by the result of `key`.  Groups and items keep their order."""
    items_by_key: dict[Key, list[Item]] = {}
    for item in items:
        items_by_key.setdefault(key(item), []).append(item)
    return items_by_key


def newest(items: Iterable[Located], key: Callable[[Record], Hashable]) -> list[Located]:
    """Returns the newest item for each value of `key`.  `items` must be sorted, oldest first."""
    return list({key(item.record): item for item in items}.values())


def benches_of(located: Iterable[Located]) -> list[Located]:
    """Returns the bench records outside A/B runs.  Half of an A/B run measures another revision or a slowed kernel."""
    return [item for item in located if item.record.stands_alone]


def choose(benches: Sequence[Located]) -> list[Located]:
    """Returns the newest bench record of each machine, op, kernel, case and scheme.  Prefers other records to profiles.

    A tuning search times several configs of one kernel.  Then the record of the fastest correct config is returned."""
    current_items = []
    for case_items in grouped(benches, lambda item: kernel_key(item.record)).values():
        groups = grouped(case_items, lambda item: item.record.status == "OK" and item.record.latency_median_ms is None)
        # A profile gives the traffic of a kernel, not its time: Nsight Compute counts under its own clock.
        group, profiles = groups.get(False, case_items), groups.get(True, [])
        run_items = [item for item in group if item.record.run_id == group[-1].record.run_id]
        configs = {str(item.record.config) for item in run_items}
        timed_items = [(time_ms, item) for item in run_items if (time_ms := latency_ms(item.record)) is not None]
        chosen_item = min(timed_items, key=lambda pair: pair[0])[1] if len(configs) > 1 and timed_items else group[-1]
        current_items.append(_with_counted(replace(chosen_item, configs=len(configs)), profiles))
    return current_items


def _code_of(record: Record) -> tuple[object, ...]:
    """Returns the commit and the source hashes that identify the code of a record."""
    return record.commit, *(record.environment.get(name) for name in ("tree", "kernel_file_sha256"))


def _with_counted(chosen: Located, profiles: Sequence[Located]) -> Located:
    """Adds the memory traffic counted by a hardware profile to the record. The profile must have the same code and
    config. Without one, returns the record unchanged."""
    bench_record, median_ms, code_id = chosen.record, latency_ms(chosen.record), _code_of(chosen.record)
    if bench_record.dirty or not any(code_id) or median_ms is None or bench_record.traffic_basis == "counted":
        return chosen
    for item in reversed(profiles):
        profile, traffic_bytes = item.record, item.record.traffic_bytes or 0.0
        is_same_code = not profile.dirty and (_code_of(profile), profile.config) == (code_id, bench_record.config)
        if profile.traffic_basis == "counted" and traffic_bytes > 0 and is_same_code:
            flops_per_byte, bytes_per_s = (bench_record.flops or 0.0) / traffic_bytes, traffic_bytes / median_ms * 1e3
            merged_record = replace(
                bench_record,
                traffic_bytes=traffic_bytes,
                intensity=flops_per_byte,
                bytes_per_s=bytes_per_s,
                traffic_basis="counted",
            )
            return replace(chosen, record=merged_record, counted=item.source)
    return chosen
