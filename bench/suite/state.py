"""What a run leaves behind as it goes, so that a killed one goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rooflab.bench.records.record import now
from rooflab.bench.suite.entries import FINAL, Outcome

FILE = "progress.json"
VERSION = 1


@dataclass(frozen=True)
class Identity:
    """What must be the same for a run to go on: the plan, the code and the machine."""

    plan: str
    commit: str | None
    tree: str
    """Hash over the source files: a checkout without git, or with changes, has no commit that names it."""
    machine_key: str

    def difference(self, now: Identity) -> str | None:
        """What is different now, in one sentence; None where nothing is."""
        words = {"plan": "the plan", "commit": "the commit", "tree": "the source", "machine_key": "the machine"}
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(now, item.name)
            if ours != theirs:
                return f"{words[item.name]} was {ours} and is {theirs}"
        return None


@dataclass
class Progress:
    """The state of a run: who it is, and what came of each entry so far."""

    identity: Identity
    options: Mapping[str, Any]
    started: str = field(default_factory=now)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    """What each entry does; of a bar, its text."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    stopped: str = ""
    """Why the run ended before the plan did."""

    def done(self, entry_id: str) -> bool:
        """Whether the entry has been dealt with."""
        return entry_id in self.outcomes and self.outcomes[entry_id].status in FINAL

    def excluded(self) -> dict[str, str]:
        """Kernels that no entry may run any more."""
        return {name: reason for outcome in self.outcomes.values() for name, reason in outcome.excluded.items()}

    def verified(self) -> tuple[str, ...] | None:
        """Kernels that a first check found right; None where none was made."""
        found = [outcome.verified for outcome in self.outcomes.values() if outcome.verified is not None]
        return tuple(dict.fromkeys(name for names in found for name in names)) if found else None

    def save(self, folder: Path) -> None:
        """Writes the state at once or not at all."""
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1, allow_nan=False)
        write_whole(folder / FILE, text + "\n")


def load(folder: Path) -> Progress | None:
    """The state in `folder`, or None where there is none.  Raises `ValueError` on a file that is not one."""
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
    """Renames the state of an earlier run, so that a new one starts; returns where it is now."""
    path = folder / FILE
    if not path.is_file():
        return None
    number = 1
    while (folder / f"progress-{number}.json").exists():
        number += 1
    return path.replace(folder / f"progress-{number}.json")


def write_whole(path: Path, text: str) -> None:
    """Writes a file at once or not at all; makes the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # a machine that is taken away must not leave an empty file
    part.replace(path)
