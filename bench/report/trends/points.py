"""Makes the points of trends from records, and orders them by their commits.

A point is the time of a kernel in one run.  Records that cannot become a point are counted for each reason.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rooflab.bench.base.git import git, top_of
from rooflab.bench.base.plain import Row
from rooflab.bench.core import Record, read
from rooflab.bench.report.sources import find_files, grouped

KEY_FIELDS = ("op", "kernel", "case", "scheme", "machine", "setting", "timer")
"""The fields that all points of a trend share: the work, the hardware, the driver and clocks, and the method."""
CIRCUMSTANCES = ("torch", "triton", "schema", "config")
"""The fields that may change within a trend, which shows the change as a mark."""
IMPORTED_PREFIX = "imported: "
"""The prefix of `timer` in a record from another tool's file."""


@dataclass(frozen=True)
class RecordFilter:
    """Selects records for a trend table by op, kernel, case and machine.  An empty field excludes no record."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    cases: Sequence[str] = ()
    machines: Sequence[str] = ()
    """Parts of machine keys.  A record is selected if its machine key contains one of them."""

    def takes(self, record: Record) -> bool:
        """Returns whether the filter selects this record."""
        machine = str(record.environment.get("machine_key"))
        return (
            (not self.ops or record.op in self.ops)
            and (not self.kernels or record.kernel in self.kernels)
            and (not self.cases or record.case_id in self.cases)
            and (not self.machines or any(machine_part in machine for machine_part in self.machines))
        )


@dataclass(frozen=True)
class TrendPoint:
    """Holds one point of a trend: the time of one kernel in one run."""

    record: Record
    """The first record of the point's measurements."""
    latency_ms: float
    """The median of the point's measurements in ms, because repeats within one process are not independent."""
    file: Any

    @property
    def circumstances(self) -> tuple[str | None, ...]:
        """Returns the values that may change within a trend, such as torch's version (see `CIRCUMSTANCES`)."""
        environment = self.record.environment
        return environment.get("torch"), environment.get("triton"), self.record.schema_version, config_of(self.record)


def read_points(paths: Sequence[Path], chosen: RecordFilter | None = None) -> Row:
    """Reads trend `points` from the records in `paths`, which are files, or folders at any depth.  Returns also the
    number of `files`, and by reason the number of records that are no point of a trend (`left_out`).

    Raises `ValueError` on a missing path, on a file without records, and if the filter selects no record."""
    chosen = chosen or RecordFilter()
    files = find_files(paths)
    file_records = [(file, record) for file in files for record in read(file)]
    selected_records = [(file, record) for file, record in file_records if chosen.takes(record)]
    if file_records and not selected_records:
        ops = sorted({str(record.op) for _, record in file_records if record.op})
        raise ValueError(f"history: none of {len(file_records)} records is chosen; their ops are {', '.join(ops)}")
    omitted_counts = Counter(omit_reason for _, record in selected_records if (omit_reason := why_not(record)))
    points = points_of((record, file.name) for file, record in selected_records if not why_not(record))
    return {"files": len(files), "points": points, "left_out": dict(omitted_counts.most_common())}


def why_not(record: Record) -> str:
    """Returns why a record cannot be a point of a trend.  The text is empty if the record can be a point."""
    if record.kind != "bench":
        return f"of kind {record.kind}"
    if record.status != "OK":
        return record.status
    if "pair" in record.metrics:
        return "one process of an A/B"
    median_ms = record.latency_median_ms
    if median_ms is None or record.basis != "measured":
        return "not measured"
    return "" if math.isfinite(median_ms) and median_ms > 0 else "its latency is no time"


def key_of(record: Record) -> tuple[str, ...]:
    """Returns the values that all points of one trend share, such as op, kernel, case and machine (`KEY_FIELDS`)."""
    machine = str(record.environment.get("machine_key") or "unknown")
    record_names = (record.op, record.kernel, record.case_id, record.scheme)
    return (*(name or "" for name in record_names), machine, setting(record), record.method)


def config_of(record: Record) -> str | None:
    """Returns the kernel's tuning config as JSON text, or None if the record has no config."""
    return None if record.config is None else json.dumps(dict(record.config), sort_keys=True)


def setting(record: Record) -> str:
    """Returns a text with the machine settings that affect speed: driver and clocks on a GPU, threads on a CPU."""
    environment = record.environment
    gpu = environment.get("gpu") or {}
    if record.device == "cuda" or (record.device is None and gpu):
        locked_clock_mhz = (record.clocks or {}).get("locked_sm_clock_mhz")
        clocks_text = "clocks free" if locked_clock_mhz is None else f"clocks locked at {locked_clock_mhz:g} MHz"
        return f"driver {gpu.get('driver') or 'unknown'}, {clocks_text}"
    num_threads = environment.get("threads")
    return "" if num_threads is None else f"{num_threads} threads, {environment.get('matmul_precision')} precision"


def points_of(records: Iterable[tuple[Record, Any]]) -> list[TrendPoint]:
    """Makes a trend point for each run, at the time of its fastest config.

    `records` has pairs of a record and its file.  Only their timestamps tell apart the runs in a
    file from another tool."""

    def run(pair: tuple[Record, Any]) -> tuple[object, ...]:
        record = pair[0]
        return key_of(record), record.run_id, record.method.startswith(IMPORTED_PREFIX) and record.timestamp

    records_by_run = grouped(records, run).values()
    config_groups = (grouped(run_records, lambda pair: config_of(pair[0])).values() for run_records in records_by_run)
    return [min(map(_point, config_records), key=lambda point: point.latency_ms) for config_records in config_groups]


def _point(measured: Sequence[tuple[Record, Any]]) -> TrendPoint:
    first_record, file = min(measured, key=lambda pair: pair[0].timestamp)
    return TrendPoint(first_record, median(record.latency_median_ms or 0.0 for record, _ in measured), file)


def repository() -> Path | None:
    """Returns the git checkout that contains the working directory, or else that of this file, or else None."""
    return top_of(Path.cwd()) or top_of(Path(__file__).parent)


def commit_order(commits: Iterable[object], root: Path | None) -> dict[str, int]:
    """Returns the position of each known commit in the git history of `root`.  A parent comes before its children."""
    commit_hashes = {commit for commit in commits if isinstance(commit, str) and re.fullmatch("[0-9a-f]+", commit)}
    if root is None or not commit_hashes:
        return {}
    git_arguments, commits_text = ("rev-list", "--topo-order", "--reverse", "--ignore-missing", "--stdin"), ""
    with suppress(ValueError):
        commits_text = git(root, *git_arguments, stdin="\n".join(commit_hashes))
    index_by_commit = {commit: commit_index for commit_index, commit in enumerate(commits_text.split())}
    return {commit: index_by_commit[commit] for commit in commit_hashes if commit in index_by_commit}
