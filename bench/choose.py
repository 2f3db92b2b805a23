"""From records to `kernels/<op>/choices.json`: the fastest kernel of each bucket that a check passed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rooflab.kernels.registry as registry
from rooflab.bench.records import Record
from rooflab.kernels.choices import BUCKETS, Phase

_ROW_KEYS = ("M", "T", "B")
"""Case keys that say how many rows a step has, the first that a case has."""
_PHASES: dict[str, tuple[Phase, ...]] = {"flash_attention": ("prefill",), "paged_attention": ("decode",)}


KERNELS = Path(registry.__file__).parent


def write_choices(records: Sequence[Record], folder: Path = KERNELS) -> list[Path]:
    """Writes `folder/<op>/choices.json` for each op with a timed kernel; entries of other devices stay.

    Only kernels that were checked on the device itself count: torch on a CPU, anything on a GPU.
    """
    written = []
    if any(record.dirty for record in records):
        raise ValueError("choose: expected records of a committed tree; commit first, and measure again")
    for op in dict.fromkeys(record.op for record in records if record.op):
        own = [record for record in records if record.op == op and _counts(record)]
        if not own:
            continue
        path = folder / op / "choices.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        gpu = own[0].environment.get("gpu")
        device = "cpu" if own[0].device == "cpu" else str((gpu or {})["name"])
        known[device] = choose(op, own)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(known, indent=2) + "\n")
        part.replace(path)
        written.append(path)
    return written


def _counts(record: Record) -> bool:
    return (
        record.kind == "bench"
        and record.status == "OK"
        and record.basis == "measured"
        and record.latency_median_ms is not None
        and record.checked_by in ("torch", "gpu")
        and record.scheme == ("fp32" if record.device == "cpu" else "bf16")  # the engine's dtype there
        and _rows(record.case) > 0
        and _is_ours(record)
    )


def _is_ours(record: Record) -> bool:
    """Whether the kernel is of this tree: the engine could not find another's."""
    kernel = registry.kernels(str(record.op)).get(str(record.kernel))
    return kernel is not None and kernel.fn.__module__.startswith("rooflab.kernels.")


def choose(op: str, records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Bucket to kernel and record: least geometric mean of latency over the bucket's cases.

    A bucket without cases takes those of the nearest number of rows. One kernel serves all buckets of an op whose
    weight kernels pack, because the engine keeps one form of a weight.
    """
    by_rows: dict[int, list[Record]] = {}
    for record in records:
        by_rows.setdefault(_rows(record.case), []).append(record)
    everything = _fastest(list(records)) if registry.get_op(op).prepared else None
    entries = {}
    for phase in _PHASES.get(op, ("decode", "prefill")):
        low = 0.0
        for high in BUCKETS[phase]:
            inside = [rows for rows in by_rows if low < rows <= high]
            nearest = min(by_rows, key=lambda rows: abs(math.log(rows / min(max(rows, low + 1), high))))
            cases = [record for rows in inside or [nearest] for record in by_rows[rows]]
            kernel = everything or _fastest(cases)
            entries[f"{phase}:{high}"] = {"kernel": kernel, "record": records[0].run_id}
            low = high
    return entries


def _rows(case: Any) -> int:
    return int(next(case[key] for key in _ROW_KEYS if key in case))


def _fastest(records: Sequence[Record]) -> str:
    """The kernel of least geometric mean latency among those timed on every one of the cases."""
    cases = {record.case_id for record in records}
    latencies: dict[str, list[float]] = {}
    for record in records:
        assert record.kernel and record.latency_median_ms, "held by _counts"
        latencies.setdefault(record.kernel, []).append(math.log(record.latency_median_ms))
    complete = {name: values for name, values in latencies.items() if len(values) == len(cases)}
    return min(complete or latencies, key=lambda name: sum(latencies[name]) / len(latencies[name]))
