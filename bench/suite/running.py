"""Which kernels an entry runs right now, kept in a file: the parent blames them where the process is gone.

It imports no torch, so that a process that needs none starts at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "running.json"


class ContextBroken(RuntimeError):
    """A kernel has broken the CUDA context: nothing more runs in this process, and the rest is for a fresh one."""


@dataclass(frozen=True)
class Running:
    """What an entry was at."""

    entry: str = ""
    kernels: tuple[str, ...] = ()
    """One kernel, or several that were timed together; empty where no kernel ran."""
    files: tuple[str, ...] = ()
    """Files that the entry writes, relative to the run's folder."""

    def note(self, folder: Path, kernels: Sequence[str]) -> None:
        """Says which kernels run next."""
        part = folder / f"{FILE}.part"  # `records.files.write_whole` would import torch
        part.write_text(json.dumps(asdict(self) | {"kernels": list(kernels)}))
        part.replace(folder / FILE)


def read_running(folder: Path, entry: str) -> Running:
    """What `entry` noted last; an empty `Running` where it noted nothing."""
    try:
        values = json.loads((folder / FILE).read_text())
        found = Running(values["entry"], tuple(values["kernels"]), tuple(values["files"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Running()
    return found if found.entry == entry else Running()


def clear_running(folder: Path) -> None:
    """Says that no kernel runs: before an entry, and after its last kernel."""
    (folder / FILE).unlink(missing_ok=True)
