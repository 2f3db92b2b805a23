"""A file that names the kernels that an entry runs now; if its process dies, the parent blames these kernels.

It imports no torch, so that a process that does not need torch starts at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rooflab.kernels._files import write_whole

FILE = "running.json"


class ContextBroken(RuntimeError):
    """A kernel has broken the CUDA context: this process can run nothing more, and a fresh process must do the rest."""


@dataclass(frozen=True)
class Running:
    """What an entry runs now."""

    entry: str = ""
    kernels: tuple[str, ...] = ()
    """One kernel, or several that are timed together; empty if no kernel runs."""
    files: tuple[str, ...] = ()
    """Files that the entry writes, relative to the run's folder."""
    began: float = 0.0
    """Unix time at which these kernels were noted."""

    def note(self, folder: Path, kernels: Sequence[str]) -> None:
        """Writes which kernels run next."""
        write_whole(folder / FILE, json.dumps(asdict(self) | {"kernels": list(kernels), "began": time.time()}))


def read_running(folder: Path, entry: str) -> Running:
    """The last note of `entry`; an empty `Running` if it noted nothing."""
    try:
        values = json.loads((folder / FILE).read_text())
        found = Running(values["entry"], tuple(values["kernels"]), tuple(values["files"]), values["began"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Running()
    return found if found.entry == entry else Running()


def clear_running(folder: Path) -> None:
    """Writes that no kernel runs: before an entry, and after its last kernel."""
    (folder / FILE).unlink(missing_ok=True)
