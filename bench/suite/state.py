"""A run's folder: the folder of each entry with its result, and the summary of all results.

The results are the whole state of a run.  An entry whose folder holds a final result is not run again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from rooflab.bench.core import NOT_RUN
from rooflab.bench.suite.entries import FINAL, BarStatus, EntryOutcome, EntryStatus
from rooflab.bench.suite.step import read_outcome, write_json

RESULT, PLAN, ENVIRONMENT, SUMMARY = "result.json", "plan.json", "environment.json", "summary.json"
NO_FAULT = ("OK", *NOT_RUN, "INVALID", "NOISY", "OUT_OF_MEMORY")
"""The statuses of records that show no fault of their kernel.  After an impossible or noisy reading, or with too large
a case, the kernel may still be right."""


def folder_of(run: Path, entry_id: str) -> Path:
    """The folder of an entry."""
    return run / entry_id.replace(":", "-")


@dataclass
class Progress:
    """The state of a run: by entry, the result so far."""

    outcomes: dict[str, EntryOutcome] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended before the end of the plan."""

    def done(self, entry_id: str) -> bool:
        """Whether a resumed run does not repeat the entry.  An entry that was ended for time is begun again."""
        outcome = self.outcomes.get(entry_id)
        return outcome is not None and outcome.status in FINAL and not outcome.reason.startswith("TIMEOUT")

    def excluded(self) -> dict[str, str]:
        """The kernels that later entries must not use; each with the reason."""
        return {name: reason for outcome in self.outcomes.values() for name, reason in outcome.excluded.items()}


def load(run: Path, plan: Sequence[str]) -> Progress:
    """Reads the results of a plan's entries in a run's folder.  Raises `ValueError` on a file without a result."""
    outcomes = {entry_id: read_outcome(folder_of(run, entry_id) / RESULT) for entry_id in plan}
    return Progress({entry_id: outcome for entry_id, outcome in outcomes.items() if outcome is not None})


def save(run: Path, entry_id: str, outcome: EntryOutcome) -> None:
    """Writes the result of an entry."""
    write_json(folder_of(run, entry_id) / RESULT, outcome)


def wrong_in(folder: Path) -> tuple[dict[str, str], Counter[str]]:
    """The kernels that records in a folder call wrong, each with its first failure, and the number of each status."""
    wrong: dict[str, str] = {}
    statuses = Counter[str]()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(errors="replace").splitlines():
            with suppress(ValueError):  # the last line may come from a process that was ended
                record = json.loads(line)
                statuses[record["status"]] += 1
                if record.get("kernel") and record["status"] not in NO_FAULT:
                    name = f"{record['op']}/{record['kernel']}"
                    where = f"{record['case_id']} {record['scheme']}: {record['status']}: {record['reason']}"
                    wrong.setdefault(name, f"{name} {where}")
    return wrong, statuses


def environment_in(run: Path) -> dict[str, Any]:
    """The machine of a run.  Empty if the run ended before the machine was recorded."""
    path = run / ENVIRONMENT
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def read_summary(run: Path) -> dict[str, Any]:
    """The summary of the run in a folder; the run may have been killed.  Raises `ValueError` if there is no run."""
    path = run / SUMMARY
    if not path.is_file():
        raise ValueError(f"summary: expected a folder with a suite run, got {str(run)!r}")
    return dict(json.loads(path.read_text()))


def write_summary(run: Path, progress: Progress, titles: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Writes the summary of a run: counts, a row for each entry and a row for each bar (a target)."""
    rows = [_row(run, name, outcome, titles.get(name, "")) for name, outcome in progress.outcomes.items()]
    bars = [
        {
            "bar": row["entry"].removeprefix("bar:"),
            "text": row["title"],
            "outcome": outcome.bar or "UNMEASURED",
            "needed": outcome.needed,
            "figures": row["figures"],
            "reason": outcome.reason if outcome.bar else outcome.reason or outcome.status,
        }
        for row, outcome in zip(rows, progress.outcomes.values(), strict=True)
        if row["entry"].startswith("bar:")
    ]
    environment = environment_in(run)
    gpu = environment.get("gpu") or {}
    statuses = Counter(row["status"] for row in rows)
    summary = {
        "options": dict(options),
        "machine_key": environment.get("machine_key"),
        "device": "cpu, dry run" if options.get("dry_run") else gpu.get("name"),
        **{name: environment.get(name) for name in ("torch", "triton", "commit", "tree", "dirty")},
        "driver": gpu.get("driver"),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "stopped": progress.stopped,
        "counts": {status: statuses[status] for status in get_args(EntryStatus) if statuses[status]},
        "bars": {name: sum(row["outcome"] == name for row in bars) for name in get_args(BarStatus)},
        "excluded": progress.excluded(),
        "invalid": 0 if options.get("dry_run") else sum(int(row["figures"].get("invalid", 0)) for row in rows),
        "entries": rows,
        "bar_rows": bars,
    }
    write_json(run / SUMMARY, summary)


def _row(run: Path, name: str, outcome: EntryOutcome, title: str) -> dict[str, Any]:
    reason = "it runs, or the run was killed under it" if outcome.status == "RUNNING" else outcome.reason
    folder = folder_of(run, name)
    return {
        "entry": name,
        "title": title,
        "status": outcome.status,
        "seconds": outcome.seconds,
        "reason": reason,
        "figures": dict(outcome.figures),
        "files": sorted(str(path.relative_to(run)) for path in folder.rglob("*") if path.is_file()),
    }


def figures_text(figures: Mapping[str, Any]) -> str:
    """The figures in one line: numbers with three digits, texts unchanged."""
    filled = {name: v for name, v in figures.items() if v is not None and not isinstance(v, dict)}
    return ", ".join(f"{name} {f'{v:.3g}' if isinstance(v, float) else v}" for name, v in filled.items())


def what(row: Mapping[str, Any]) -> str:
    """The result of a row: why its entry is not done, and the figures."""
    return "; ".join(filter(None, (" ".join(row["reason"].split()), figures_text(row["figures"]))))
