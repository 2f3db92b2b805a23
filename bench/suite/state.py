"""Reads and writes the folder of a suite run: a folder with a result for each entry, and a summary of all results.

These results are the whole state of a run.  A resumed run does not repeat an entry with a final result.
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
from rooflab.bench.suite.entries import FINAL_STATUSES, BarStatus, EntryOutcome, EntryStatus
from rooflab.bench.suite.step import read_outcome, write_json

RESULT_FILE, PLAN, ENVIRONMENT, SUMMARY = "result.json", "plan.json", "environment.json", "summary.json"
NO_FAULT_STATUSES = ("OK", *NOT_RUN, "INVALID", "NOISY", "OUT_OF_MEMORY")
"""The statuses of records that show no fault of their kernel.  After an impossible or noisy reading, or with too large
a case, the kernel may still be right."""


def folder_of(run: Path, entry_id: str) -> Path:
    """Returns the folder of an entry in the folder of the suite run."""
    return run / entry_id.replace(":", "-")


@dataclass
class Progress:
    """Holds the results of all entries so far in a suite run."""

    outcomes: dict[str, EntryOutcome] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended before the end of the plan."""

    def done(self, entry_id: str) -> bool:
        """Returns whether a resumed run can skip the entry.  An entry that was killed at its time limit runs again."""
        outcome = self.outcomes.get(entry_id)
        return outcome is not None and outcome.status in FINAL_STATUSES and not outcome.reason.startswith("TIMEOUT")

    def excluded(self) -> dict[str, str]:
        """Returns the kernels that later entries must not run, and the reason for each kernel."""
        return {name: reason for outcome in self.outcomes.values() for name, reason in outcome.excluded.items()}


def load(run: Path, plan: Sequence[str]) -> Progress:
    """Reads the results of a plan's entries from the folder `run`.  Raises `ValueError` on an invalid file."""
    outcomes = {entry_id: read_outcome(folder_of(run, entry_id) / RESULT_FILE) for entry_id in plan}
    return Progress({entry_id: outcome for entry_id, outcome in outcomes.items() if outcome is not None})


def save(run: Path, entry_id: str, outcome: EntryOutcome) -> None:
    """Writes the result of an entry to the entry's folder."""
    write_json(folder_of(run, entry_id) / RESULT_FILE, outcome)


def wrong_in(folder: Path) -> tuple[dict[str, str], Counter[str]]:
    """Returns the first failure of each failed kernel in a folder's records, and the number of records per status."""
    failure_by_kernel: dict[str, str] = {}
    num_by_status = Counter[str]()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(errors="replace").splitlines():
            with suppress(ValueError):  # the last line may come from a process that was ended
                record = json.loads(line)
                num_by_status[record["status"]] += 1
                if record.get("kernel") and record["status"] not in NO_FAULT_STATUSES:
                    name = f"{record['op']}/{record['kernel']}"
                    failure_text = f"{record['case_id']} {record['scheme']}: {record['status']}: {record['reason']}"
                    failure_by_kernel.setdefault(name, f"{name} {failure_text}")
    return failure_by_kernel, num_by_status


def environment_in(run: Path) -> dict[str, Any]:
    """Returns the description of a run's machine and software, or an empty one if the run did not write it."""
    path = run / ENVIRONMENT
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def read_summary(run: Path) -> dict[str, Any]:
    """Reads the summary of a suite run, which may have been killed.  Raises `ValueError` if there is no run."""
    path = run / SUMMARY
    if not path.is_file():
        raise ValueError(f"summary: expected a folder with a suite run, got {str(run)!r}")
    return dict(json.loads(path.read_text()))


def write_summary(run: Path, progress: Progress, titles: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Writes the summary of a suite run: counts, a row for each entry, and a row for each performance target."""
    rows = [_row(run, name, outcome, titles.get(name, "")) for name, outcome in progress.outcomes.items()]
    target_rows = [
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
    num_by_status = Counter(row["status"] for row in rows)
    summary = {
        "options": dict(options),
        "machine_key": environment.get("machine_key"),
        "device": "cpu, dry run" if options.get("dry_run") else gpu.get("name"),
        **{name: environment.get(name) for name in ("torch", "triton", "commit", "tree", "dirty")},
        "driver": gpu.get("driver"),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "stopped": progress.stopped,
        "counts": {status: num_by_status[status] for status in get_args(EntryStatus) if num_by_status[status]},
        "bars": {name: sum(row["outcome"] == name for row in target_rows) for name in get_args(BarStatus)},
        "excluded": progress.excluded(),
        "invalid": 0 if options.get("dry_run") else sum(int(row["figures"].get("invalid", 0)) for row in rows),
        "entries": rows,
        "bar_rows": target_rows,
    }
    write_json(run / SUMMARY, summary)


def _row(run: Path, name: str, outcome: EntryOutcome, title: str) -> dict[str, Any]:
    outcome_reason = "it runs, or the run was killed under it" if outcome.status == "RUNNING" else outcome.reason
    folder = folder_of(run, name)
    return {
        "entry": name,
        "title": title,
        "status": outcome.status,
        "seconds": outcome.seconds,
        "reason": outcome_reason,
        "figures": dict(outcome.figures),
        "files": sorted(str(path.relative_to(run)) for path in folder.rglob("*") if path.is_file()),
    }


def figures_text(figures: Mapping[str, Any]) -> str:
    """Formats the numbers and texts in an entry's result as one line.  Numbers have three significant digits."""
    simple_figures = {name: v for name, v in figures.items() if v is not None and not isinstance(v, dict)}
    return ", ".join(f"{name} {f'{v:.3g}' if isinstance(v, float) else v}" for name, v in simple_figures.items())


def what(row: Mapping[str, Any]) -> str:
    """Returns a text about an entry's result: the reason if it is not done, and its numbers."""
    return "; ".join(filter(None, (" ".join(row["reason"].split()), figures_text(row["figures"]))))
