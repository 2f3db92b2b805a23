"""The files in a run's folder: the summary and `progress.json`, from which a killed run continues where it stopped.

`summary.json` and `summary.md` give the outcome of every entry and bar.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import Any, get_args

from rooflab.bench.records.record import now
from rooflab.bench.suite.entries import FINAL, EntryStatus, Outcome
from rooflab.kernels._files import write_whole

FILE = "progress.json"
VERSION = 1
PACK_S = 20.0
"""Seconds between two packings; one takes less than a second."""


@dataclass(frozen=True)
class Identity:
    """What must be equal for a run to continue: the plan, the code and the machine."""

    plan: str
    commit: str | None
    tree: str
    """Hash over the source files: without git, or with uncommitted changes, no commit names the checkout."""
    machine_key: str

    def difference(self, now: Identity) -> str | None:
        """The present difference, in one sentence; None if there is none."""
        words = {"plan": "the plan", "commit": "the commit", "tree": "the source", "machine_key": "the machine"}
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(now, item.name)
            if ours != theirs:
                return f"{words[item.name]} was {ours} and is {theirs}"
        return None


@dataclass
class Progress:
    """The state of a run: its identity, and the outcome of each entry so far."""

    identity: Identity
    options: Mapping[str, Any]
    started: str = field(default_factory=now)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    """Title by entry; for a bar, its text."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended before the end of the plan."""

    def done(self, entry_id: str) -> bool:
        """Whether a resumed run leaves the entry as it is; one that was ended for time is begun again."""
        found = self.outcomes.get(entry_id)
        return found is not None and found.status in FINAL and not found.reason.startswith("TIMEOUT")

    def excluded(self) -> dict[str, str]:
        return {name: reason for outcome in self.outcomes.values() for name, reason in outcome.excluded.items()}

    def verified(self) -> tuple[str, ...] | None:
        """Kernels that a first check found correct; None if no first check ran."""
        found = [outcome.verified for outcome in self.outcomes.values() if outcome.verified is not None]
        return tuple(dict.fromkeys(name for names in found for name in names)) if found else None

    def save(self, folder: Path) -> None:
        """Writes the whole state atomically."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False)
        write_whole(folder / FILE, text + "\n")


def load(folder: Path) -> Progress | None:
    """The state in `folder`, or None if there is none.  Raises `ValueError` on a file that holds no state."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        if values.pop("version") != VERSION:
            raise ValueError(f"{path.name}: expected version {VERSION}")
        values["identity"] = Identity(**values["identity"])
        values["outcomes"] = {name: outcome_of(found) for name, found in values["outcomes"].items()}
        return Progress(**values)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected the state of a suite run, got {error}") from error


def outcome_of(values: Mapping[str, Any]) -> Outcome:
    """An `Outcome` from its JSON."""
    verified = values.get("verified")
    tuples = {"files": tuple(values.get("files", ())), "verified": None if verified is None else tuple(verified)}
    return Outcome(**{**values, **tuples})


def set_aside(folder: Path) -> Path | None:
    """Renames the state of an earlier run, so that a new run can start; returns its new path."""
    path = folder / FILE
    if not path.is_file():
        return None
    number = 1
    while (folder / f"progress-{number}.json").exists():
        number += 1
    return path.replace(folder / f"progress-{number}.json")


def pack(folder: Path, archive: Path) -> Path:
    """Writes a run's folder as one `.tar.gz`, without what was compiled: a rented machine may give back few files."""
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and path.resolve() != archive.resolve() and name.parts[0] != "cache":
                with suppress(FileNotFoundError):  # it was there for a moment, while a file was written
                    file.add(path, name)
    return write_whole(archive, content.getvalue())


@contextmanager
def packed(folder: Path, archive: Path, every_s: float = PACK_S) -> Iterator[None]:
    """Packs a run's folder every few seconds, and at the end: a run that is killed leaves what it had done."""
    over = Event()

    def keep() -> None:
        while not over.wait(every_s):
            pack(folder, archive)

    thread = Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        pack(folder, archive)


def unpack(archive: Path, folder: Path) -> None:
    """Fills a folder from such an archive, so that another machine can go on.  Raises `ValueError` if it is none."""
    try:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"archive: expected a .tar.gz of a suite's folder, got {str(archive)!r}: {error}") from error


def write_summary(folder: Path, progress: Progress) -> None:
    """Writes both summary files of a run."""
    found = summarize(progress)
    write_whole(folder / "summary.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_whole(folder / "summary.md", as_markdown(found))


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of the run in `folder`, also of a killed run.  Raises `ValueError` if there is none."""
    progress = load(folder)
    if progress is None:
        raise ValueError(f"summary: expected a folder with a suite run, got {str(folder)!r}")
    return summarize(progress)


def summarize(progress: Progress) -> dict[str, Any]:
    """Counts, a row for each entry and a row for each bar."""
    titles = progress.titles
    rows = [_row(name, outcome, titles.get(name, "")) for name, outcome in progress.outcomes.items()]
    bars = [
        _bar(name, outcome, titles.get(name, ""))
        for name, outcome in progress.outcomes.items()
        if name.startswith("bar:")
    ]
    environment = progress.environment
    gpu = environment.get("gpu") or {}
    statuses = Counter(row["status"] for row in rows)
    counts = {status: statuses[status] for status in get_args(EntryStatus) if statuses[status]}
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
    """Figures in one line: numbers with three digits, texts unchanged."""
    parts = []
    for name, value in figures.items():
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        if value is not None and not isinstance(value, dict):
            parts.append(f"{name} {text}")
    return ", ".join(parts)


def what(row: dict[str, Any]) -> str:
    """The result of a row: the reason why it is not done, and its figures."""
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
