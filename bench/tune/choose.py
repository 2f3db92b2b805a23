"""Writes the fastest kernel and config for each range of row counts to `kernels/<op>/choices.json`, from records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rooflab.bench.core import Record
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import BUCKET_ROWS, bucket_of, rows_of
from rooflab.reference.spec import Case, get_scheme

KERNELS_FOLDER = Path(registry.__file__).parent


def write_choices(records: Sequence[Record], folder: Path = KERNELS_FOLDER) -> list[Path]:
    """Writes the best kernels of each op with times to `folder/<op>/choices.json`.  Entries for other devices stay.

    Only kernels that passed their check on a GPU count.  Raises `ValueError` if a record names no commit, or if its
    working tree had uncommitted changes.
    """
    counted_records = [record for record in records if _counts(record)]
    if any(record.dirty or record.commit is None for record in counted_records):
        raise ValueError("choose: expected records of a committed tree; commit first, and measure again")
    paths: dict[Path, None] = {}
    records_by_card: dict[tuple[str, str], list[Record]] = {}
    for record in counted_records:
        records_by_card.setdefault((str(record.op), str(record.environment["gpu"]["name"])), []).append(record)
    for (op, gpu_name), group_records in records_by_card.items():
        choices_file = folder / op / "choices.json"
        choice_by_gpu = json.loads(choices_file.read_text()) if choices_file.is_file() else {}
        choice_by_gpu[gpu_name] = choose(op, group_records)
        write_whole(choices_file, json.dumps(choice_by_gpu, indent=2, allow_nan=False) + "\n")
        paths[choices_file] = None
    return list(paths)


def _counts(record: Record) -> bool:
    return (
        record.kind == "bench"
        and record.status == "OK"
        and record.basis == "measured"
        and record.latency_median_ms is not None
        and record.checked_by == "gpu"
        and record.scheme == "bf16"  # the engine's dtype there
        and (rows_of(record.case) or 0) > 0
        and _kernel(record) is not None
    )


def _kernel(record: Record) -> Kernel | None:
    """Returns the record's kernel. Returns None for a kernel outside Rooflab, because the engine cannot load it."""
    kernel = registry.kernels(str(record.op)).get(str(record.kernel))
    return kernel if kernel is not None and kernel.fn.__module__.startswith("rooflab.kernels.") else None


@dataclass(frozen=True)
class _Contender:
    """Holds the times of a kernel for one range of row counts: with a fixed config, or with its launcher's choices."""

    kernel: str
    config: str = ""
    """The fixed config as JSON.  Empty if the launcher's heuristic chose the config."""
    run_id: str = ""
    latencies: dict[str, float] = field(default_factory=dict, compare=False)
    """By case, the log of the latency."""

    @property
    def mean(self) -> float:
        return sum(self.latencies.values()) / len(self.latencies)


def choose(op: str, records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Returns the best kernel for each range of row counts (bucket), with its record and config.

    The best kernel has the least geometric mean of the times.  A range without cases uses the nearest number of rows.
    The engine stores a weight only once, so all ranges use one weight layout."""
    row_groups: dict[int, list[Record]] = {}
    for record in records:
        row_groups.setdefault(rows_of(record.case) or 0, []).append(record)  # above 0, by _counts
    buckets: dict[str, list[Record]] = {}
    prev_limit = 0.0
    for limit in BUCKET_ROWS:
        rows_in_bucket = [rows for rows in row_groups if prev_limit < rows <= limit]
        nearest_rows = min(row_groups, key=lambda rows: abs(math.log(rows / min(max(rows, prev_limit + 1), limit))))
        buckets[bucket_of(limit)] = [record for rows in rows_in_bucket or [nearest_rows] for record in row_groups[rows]]
        prev_limit = limit
    best_by_bucket = {bucket: _best_by_kernel(cases) for bucket, cases in buckets.items()}
    allowed_kernels = _of_one_packing(op, best_by_bucket)
    scheme = str(records[0].scheme)
    return {bucket: _entry(candidates, allowed_kernels, scheme) for bucket, candidates in best_by_bucket.items()}


def _best_by_kernel(records: Sequence[Record]) -> dict[str, _Contender]:
    """Returns the fastest config of each kernel. If any config was timed on all cases, only such configs count."""
    candidates: dict[tuple[str, str], _Contender] = {}
    for record in records:
        assert record.kernel and record.case_id and record.latency_median_ms, "held by _counts"
        for config in _configs(record):
            candidate = candidates.setdefault((record.kernel, config), _Contender(record.kernel, config, record.run_id))
            candidate.latencies[record.case_id] = math.log(record.latency_median_ms)
    cases = {record.case_id for record in records}
    complete_contenders = [candidate for candidate in candidates.values() if candidate.latencies.keys() == cases]
    best_by_kernel: dict[str, _Contender] = {}
    # On equal times the launcher's own choice comes first: a config must be faster to be written to the file.
    for candidate in sorted(complete_contenders or candidates.values(), key=lambda x: (x.mean, bool(x.config))):
        best_by_kernel.setdefault(candidate.kernel, candidate)
    return best_by_kernel


def _configs(record: Record) -> list[str]:
    """Returns the keys under which a record's time is stored. One key is the record's config as JSON text. If this
    config is also the kernel's default, "" is a second key. A record without a config has only the key ""."""
    kernel = _kernel(record)
    if record.config is None or kernel is None or kernel.tuning is None:
        return [""]
    default_config = kernel.tuning.heuristic(Case(**record.case), get_scheme(str(record.scheme)))
    config_texts = [json.dumps(dict(record.config))]
    return ["", *config_texts] if asdict(default_config) == dict(record.config) else config_texts


def _of_one_packing(op: str, best: Mapping[str, Mapping[str, _Contender]]) -> set[str]:
    """Returns the kernels that use the fastest packed layout of the weights. A layout's time is the sum over all ranges
    of row counts. Returns all kernels if the op packs no weights."""
    kernel_names = {name for row in best.values() for name in row}
    if registry.get_op(op).prepared is None:
        return kernel_names
    names_by_layout: dict[Any, set[str]] = {}
    for name in sorted(kernel_names):
        names_by_layout.setdefault(registry.get_kernel(op, name).prepare, set()).add(name)

    def total(group: set[str]) -> tuple[bool, float]:
        min_log_ms = [min((row[name].mean for name in group if name in row), default=math.inf) for row in best.values()]
        return math.inf in min_log_ms, sum(min_log_ms)

    return min(names_by_layout.values(), key=total)


def _entry(best: Mapping[str, _Contender], allowed: set[str], scheme: str) -> dict[str, Any]:
    best_contender = next((candidate for name, candidate in best.items() if name in allowed), next(iter(best.values())))
    kernel_choice: dict[str, Any] = {"kernel": best_contender.kernel, "record": best_contender.run_id}
    configs = {name: json.loads(candidate.config) for name, candidate in best.items() if candidate.config}
    return kernel_choice | ({"scheme": scheme, "configs": configs} if configs else {})
