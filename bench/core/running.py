"""Writes the names of the running kernels to a file.  The environment variable `ROOFLAB_RUNNING` gives the file's path.

If the process dies, its parent process reads the file.  The parent then reports which kernels ran at that time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rooflab.bench.base.system_time import time

ENVIRONMENT_VARIABLE = "ROOFLAB_RUNNING"


class ContextBroken(RuntimeError):
    """Raised after a kernel broke the CUDA context.  This process can run no more kernels, but a new process can."""


class Running(NamedTuple):
    """Describes the kernels that run now, with their start time."""

    kernels: tuple[str, ...] = ()
    """One kernel, or several that are timed together; empty if no kernel runs."""
    began: float = 0.0
    """Unix time at which these kernels were noted."""

    @staticmethod
    def note(kernels: Sequence[str]) -> None:
        """Writes the names of `kernels` to the file `ROOFLAB_RUNNING`.  Does nothing if this variable is not set."""
        if path := os.environ.get(ENVIRONMENT_VARIABLE):
            temp_path = Path(f"{path}.part")
            temp_path.write_text(json.dumps({"kernels": list(kernels), "began": time.time()}))
            temp_path.replace(path)  # in one step, and not forced to the disk: the note outlives its process alone

    @staticmethod
    def variable(path: Path) -> dict[str, str]:
        """Returns the environment variable that makes a process write its running kernels to `path`."""
        return {ENVIRONMENT_VARIABLE: str(path)}

    @classmethod
    def read(cls, path: Path) -> Running:
        """Reads the running kernels from the file `path`.  Returns an empty `Running` if there is no such file."""
        try:
            file_values = json.loads(path.read_text())
            return cls(tuple(file_values["kernels"]), float(file_values["began"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls()
