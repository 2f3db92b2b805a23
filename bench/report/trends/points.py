"""From records to the points of trends, and the order of their commits.

A frame has one row for each timed kernel and run; records without a place in a trend are counted by reason.
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
from typing import Any

import pandas as pd

from rooflab.bench.core import Record, read
from rooflab.bench.report.sources import find_files
from rooflab.bench.revisions.trees import git

KEY = ("op", "kernel", "case", "scheme", "machine", "setting", "timer")
"""What two points must share to be compared: the work, the hardware, the driver and the clocks, and the method."""
CIRCUMSTANCES = ("torch", "triton", "schema", "config")
"""What may change within a trend; the trend shows a change as a mark."""
COLUMNS = (*KEY, "commit", "dirty", "time", "run_id", "latency_ms", *CIRCUMSTANCES, "file")
IMPORTED = "imported: "
"""Prefix of the timer in a record from another tool's file."""


@dataclass(frozen=True)
class RecordFilter:
    """Which records a history contains; an empty field selects all."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    cases: Sequence[str] = ()
    machines: Sequence[str] = ()
    """Parts of machine keys."""

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
class Points:
    """A frame with `COLUMNS`, one row for each point, and the number of records left out."""

    frame: pd.DataFrame
    left_out: Mapping[str, int]
    """Number of records without a place in a trend, by reason."""
    files: int


def read_points(paths: Sequence[Path], chosen: RecordFilter | None = None) -> Points:
    """The points of every record in `paths`: files, or folders with all below them.

    Raises `ValueError` on a missing path, on a file with other content, and if no record is selected.
    """
    chosen = chosen or RecordFilter()
    files = find_files(paths)
    found = [(file, record) for file in files for record in read(file)]
    taken = [(file, record) for file, record in found if chosen.takes(record)]
    if found and not taken:
        known = sorted({str(record.op) for _, record in found if record.op})
        raise ValueError(f"history: none of {len(found)} records is chosen; their ops are {', '.join(known)}")
    left_out = Counter(reason for _, record in taken if (reason := why_not(record)))
    frame = frame_of((record, file.name) for file, record in taken if not why_not(record))
    return Points(frame, dict(left_out.most_common()), len(files))


def why_not(record: Record) -> str:
    """Why a record is not a point of a trend; empty if it is a point."""
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


def _row(record: Record, file: object) -> dict[str, Any]:
    environment = record.environment
    config = None if record.config is None else json.dumps(dict(record.config), sort_keys=True)
    return {
        "op": record.op or "",
        "kernel": record.kernel or "",
        "case": record.case_id or "",
        "scheme": record.scheme or "",
        "machine": str(environment.get("machine_key") or "unknown"),
        "setting": setting(record),
        "timer": record.method,
        "commit": record.commit,
        "dirty": bool(record.dirty),
        "time": record.timestamp,
        "run_id": record.run_id,
        "latency_ms": record.latency_median_ms,
        "torch": environment.get("torch"),
        "triton": environment.get("triton"),
        "schema": record.schema_version,
        "config": config,
        "file": file,
    }


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


def frame_of(records: Iterable[tuple[Record, object]]) -> pd.DataFrame:
    """A frame of records, each with its file.  A run has one point per key, the median of its measurements, because
    repeats within one process are not independent; of a run that timed several configs, the point of the fastest.

    Another tool's file may hold many runs, which differ only in their times.
    """
    frame = pd.DataFrame([_row(record, file) for record, file in records], columns=list(COLUMNS))
    if frame.empty:
        return frame
    frame["time"] = pd.to_datetime(frame["time"], utc=True, format="ISO8601")
    own_time = frame["time"].astype("int64").where(frame["timer"].str.startswith(IMPORTED), 0)
    run = [*KEY, "run_id", "own_time"]
    grouped = frame.assign(own_time=own_time).groupby([*run, "config"], sort=False, dropna=False)
    taken = {name: "first" for name in COLUMNS if name not in (*KEY, "run_id", "config")}
    taken |= {"latency_ms": "median", "time": "min"}
    configs = grouped.agg(taken).reset_index()
    merged = configs.loc[configs.groupby(run, sort=False)["latency_ms"].idxmin()].reset_index(drop=True)
    return merged[list(COLUMNS)].astype({"commit": object, "config": object})


def repository(folder: Path | None = None) -> Path | None:
    """The checkout that contains `folder`, else the running program's checkout; None if neither is a checkout."""
    for place in (folder or Path.cwd(), Path(__file__).parent):
        with suppress(ValueError):
            return Path(git(place, "rev-parse", "--show-toplevel"))
    return None


def commit_order(commits: Iterable[object], root: Path | None) -> dict[str, int]:
    """The place of each commit that the repository at `root` knows, parents before children; others have none."""
    wanted = {commit for commit in commits if isinstance(commit, str) and re.fullmatch("[0-9a-f]+", commit)}
    if root is None or not wanted:
        return {}
    asked, listed = ("rev-list", "--topo-order", "--reverse", "--ignore-missing", "--stdin"), ""
    with suppress(ValueError):
        listed = git(root, *asked, stdin="\n".join(wanted))
    places = {commit: place for place, commit in enumerate(listed.split())}
    return {commit: places[commit] for commit in wanted if commit in places}
