"""What came of a run: done, failed, not reached, and every bar with its figure.  `summary.json` and `summary.md`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Outcome
from rooflab.bench.suite.state import Progress, write_whole


def write(folder: Path, progress: Progress) -> None:
    """Writes both files of a run."""
    found = summarize(progress)
    write_whole(folder / "summary.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_whole(folder / "summary.md", as_markdown(found))


def read(folder: Path) -> dict[str, Any]:
    """The summary of the run in `folder`, also of one that was killed.  Raises `ValueError` where there is none."""
    progress = state.load(folder)
    if progress is None:
        raise ValueError(f"summary: expected a folder with a suite run, got {str(folder)!r}")
    return summarize(progress)


def summarize(progress: Progress) -> dict[str, Any]:
    """Counts, a row for each entry and a row for each bar."""
    titles = progress.titles
    rows = [_row(name, outcome, titles.get(name, "")) for name, outcome in progress.outcomes.items()]
    bars = [_bar(name, outcome, titles.get(name, "")) for name, outcome in progress.outcomes.items() if _is_bar(name)]
    environment = progress.environment
    gpu = environment.get("gpu") or {}
    counts = {status: sum(row["status"] == status for row in rows) for status in dict.fromkeys(_statuses(rows))}
    return {
        "started": progress.started,
        "machine_key": progress.identity.machine_key,
        "device": "cpu, dry run" if progress.options.get("dry_run") else gpu.get("name"),
        "driver": gpu.get("driver"),
        "torch": environment.get("torch"),
        "triton": environment.get("triton"),
        "commit": progress.identity.commit,
        "tree": progress.identity.tree,
        "dirty": environment.get("dirty"),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "stopped": progress.stopped,
        "counts": counts,
        "bars": {name: sum(row["outcome"] == name for row in bars) for name in ("MET", "MISSED", "UNMEASURED")},
        "excluded": progress.excluded(),
        "invalid": sum(int(row["figures"].get("invalid", 0)) for row in rows),
        "entries": rows,
        "bar_rows": bars,
    }


def _statuses(rows: Sequence[dict[str, Any]]) -> list[str]:
    order = ("DONE", "PARTIAL", "FAILED", "UNSUPPORTED", "BLOCKED", "NOT_REACHED", "RUNNING")
    return sorted({row["status"] for row in rows}, key=order.index)


def _is_bar(name: str) -> bool:
    return name.startswith("bar:")


def _row(name: str, outcome: Outcome, title: str) -> dict[str, Any]:
    reason = "it runs, or the run was killed under it" if outcome.status == "RUNNING" else outcome.reason
    return {
        "entry": name,
        "title": title,
        "status": outcome.status,
        "seconds": outcome.seconds,
        "reason": reason,
        "figures": dict(outcome.figures),
        "files": list(outcome.files),
    }


def _bar(name: str, outcome: Outcome, title: str) -> dict[str, Any]:
    return {
        "bar": name.removeprefix("bar:"),
        "text": title,
        "outcome": outcome.bar or "UNMEASURED",
        "needed": outcome.needed,
        "figures": dict(outcome.figures),
        "reason": outcome.reason if outcome.bar else outcome.reason or outcome.status,
        "files": list(outcome.files),
    }


def figures_text(figures: dict[str, Any]) -> str:
    """Figures in a line: three digits, texts as they are."""
    parts = []
    for name, value in figures.items():
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        if value is not None and not isinstance(value, dict):
            parts.append(f"{name} {text}")
    return ", ".join(parts)


def what(row: dict[str, Any]) -> str:
    """What a row came to: why not, and its figures."""
    parts = [part for part in (" ".join(row["reason"].split()), figures_text(row["figures"])) if part]
    return "; ".join(parts)


def as_markdown(found: dict[str, Any]) -> str:
    """The summary as a page."""
    head = ", ".join(f"{count} {status.lower().replace('_', ' ')}" for status, count in found["counts"].items())
    lines = ["# Suite", "", f"{found['device']}; {head}; {found['seconds']:.0f} s in all.", ""]
    if found["stopped"]:
        lines += [found["stopped"], ""]
    lines += ["## Bars", "", "| bar | outcome | needed | what came of it |", "|---|---|---|---|"]
    for row in found["bar_rows"]:
        cells = (row["bar"], row["outcome"], row["needed"], what(row))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    lines += ["", "## Entries", "", "| entry | status | s | what came of it |", "|---|---|--:|---|"]
    for row in found["entries"]:
        cells = (row["entry"], row["status"], f"{row['seconds']:.0f}", what(row))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:300]
