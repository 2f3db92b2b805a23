"""Makes the points of trends from records, and orders their commits.

A point is a timed kernel in a run.  Records that cannot be a point of a trend are counted by reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rooflab.bench.base.git import git
from rooflab.bench.core import Record, read
from rooflab.bench.report.sources import find_files, grouped

KEY = ("op", "kernel", "case", "scheme", "machine", "setting", "timer")
"""The fields that all points of a trend share: the work, the hardware, the driver and clocks, and the method."""
CIRCUMSTANCES = ("torch", "triton", "schema", "config")
"""The fields that may change within a trend, which shows the change as a mark."""
IMPORTED = "imported: "
"""The prefix of `timer` in a record from another tool's file."""


@dataclass(frozen=True)
class RecordFilter:
    """The records that a history selects.  An empty field selects all records."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    cases: Sequence[str] = ()
    machines: Sequence[str] = ()
    """Parts of machine keys.  A record is selected if its machine key contains one of them."""

    def takes(self, record: Record) -> bool:
        """Whether the record is selected."""
        machine = str(record.environment.get("machine_key"))
        return (
            (not self.ops or record.op in self.ops)
            and (not self.kernels or record.kernel in self.kernels)
            and (not self.cases or record.case_id in self.cases)
            and (not self.machines or any(part in machine for part in self.machines))
        )


@dataclass(frozen=True)
class TrendPoint:
    """The time of one kernel in one run."""

    record: Record
    """The first record of the point's measurements."""
    latency_ms: float
    """The median of the point's measurements in ms, because repeats within one process are not independent."""
    file: Any

    @property
    def circumstances(self) -> tuple[str | None, ...]:
        """The record's values of the fields in `CIRCUMSTANCES`."""
        environment = self.record.environment
        return environment.get("torch"), environment.get("triton"), self.record.schema_version, config_of(self.record)


@dataclass(frozen=True)
class Points:
    """The points in files, and the number of records left out."""

    points: Sequence[TrendPoint]
    left_out: Mapping[str, int]
    """By reason, the number of records that are no point of a trend."""
    files: int


def read_points(paths: Sequence[Path], chosen: RecordFilter | None = None) -> Points:
    """Reads the points of every record in `paths`: files, or folders with all files below them.

    Raises `ValueError` on a missing path, on a file with other content, and if no record is selected.
    """
    chosen = chosen or RecordFilter()
    files = find_files(paths)
    pairs = [(file, record) for file in files for record in read(file)]
    selected = [(file, record) for file, record in pairs if chosen.takes(record)]
    if pairs and not selected:
        ops = sorted({str(record.op) for _, record in pairs if record.op})
        raise ValueError(f"history: none of {len(pairs)} records is chosen; their ops are {', '.join(ops)}")
    left_out = Counter(reason for _, record in selected if (reason := why_not(record)))
    points = points_of((record, file.name) for file, record in selected if not why_not(record))
    return Points(points, dict(left_out.most_common()), len(files))


def why_not(record: Record) -> str:
    """The reason why a record is not a point of a trend; empty if it is a point."""
    if record.kind != "bench":
        return f"of kind {record.kind}"
    if record.status != "OK":
        return record.status
    if "pair" in record.metrics:
        return "one process of an A/B"
    latency = record.latency_median_ms
    if latency is None or record.basis != "measured":
        return "not measured"
    return "" if math.isfinite(latency) and latency > 0 else "its latency is no time"


def key_of(record: Record) -> tuple[str, ...]:
    """The record's values of the fields in `KEY`."""
    machine = str(record.environment.get("machine_key") or "unknown")
    names = (record.op, record.kernel, record.case_id, record.scheme)
    return (*(name or "" for name in names), machine, setting(record), record.method)


def config_of(record: Record) -> str | None:
    """The kernel's config as a text; None if the record has no config."""
    return None if record.config is None else json.dumps(dict(record.config), sort_keys=True)


def setting(record: Record) -> str:
    """The settings of the machine that decide speed: driver and clocks on a GPU, threads on a CPU."""
    environment = record.environment
    gpu = environment.get("gpu") or {}
    if record.device == "cuda" or (record.device is None and gpu):
        locked = (record.clocks or {}).get("locked_sm_clock_mhz")
        clocks = "clocks free" if locked is None else f"clocks locked at {locked:g} MHz"
        return f"driver {gpu.get('driver') or 'unknown'}, {clocks}"
    threads = environment.get("threads")
    return "" if threads is None else f"{threads} threads, {environment.get('matmul_precision')} precision"


def points_of(records: Iterable[tuple[Record, Any]]) -> list[TrendPoint]:
    """Makes points of pairs of a record and its file.  If a run timed several configs, its point is the fastest config.

    Another tool's file may contain many runs, which differ only in their times.
    """

    def run(pair: tuple[Record, Any]) -> tuple[object, ...]:
        record = pair[0]
        return key_of(record), record.run_id, record.method.startswith(IMPORTED) and record.timestamp

    runs = grouped(records, run).values()
    configs = (grouped(pairs, lambda pair: config_of(pair[0])).values() for pairs in runs)
    return [min(map(_point, each), key=lambda point: point.latency_ms) for each in configs]


def _point(measured: Sequence[tuple[Record, Any]]) -> TrendPoint:
    first, file = min(measured, key=lambda pair: pair[0].timestamp)
    return TrendPoint(first, median(record.latency_median_ms or 0.0 for record, _ in measured), file)


def repository(folder: Path | None = None) -> Path | None:
    """The checkout that contains `folder`, or else the running program's checkout.  None if neither is a checkout."""
    for place in (folder or Path.cwd(), Path(__file__).parent):
        with suppress(ValueError):
            return Path(git(place, "rev-parse", "--show-toplevel"))
    return None


def commit_order(commits: Iterable[object], root: Path | None) -> dict[str, int]:
    """The index of each commit that the repository at `root` knows, parents before children; others are left out."""
    hashes = {commit for commit in commits if isinstance(commit, str) and re.fullmatch("[0-9a-f]+", commit)}
    if root is None or not hashes:
        return {}
    arguments, listed = ("rev-list", "--topo-order", "--reverse", "--ignore-missing", "--stdin"), ""
    with suppress(ValueError):
        listed = git(root, *arguments, stdin="\n".join(hashes))
    places = {commit: place for place, commit in enumerate(listed.split())}
    return {commit: places[commit] for commit in hashes if commit in places}
