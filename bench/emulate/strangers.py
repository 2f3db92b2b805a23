"""Runs a program written for a GPU, such as a project's own test suite, in the emulator, unchanged.

The program runs in a child process (`strangers_worker.py`).  This file reads its command line and its report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rooflab.bench.base.statuses import ExitStatus

WORKER_MODULE = "rooflab.bench.emulate.strangers_worker"
_EXPECTED = "program: expected pytest ..., python script.py ... or python -m module ..."


@dataclass(frozen=True)
class StrangersProgram:
    """Describes what to run: the arguments of pytest, or a module or a script with its arguments."""

    kind: str
    """`pytest`, `module` or `script`."""
    words: list[str]
    imports_here: bool = False
    """Whether imports look in the current folder first, as with `python -m`."""

    @classmethod
    def of(cls, words: Sequence[str]) -> StrangersProgram:
        """Reads a program's command line.  Raises `ValueError` if it names no program that can be run."""
        if words[0] == "pytest":
            return cls("pytest", list(words[1:]))
        if words[1:3] == ["-m", "pytest"]:
            return cls("pytest", list(words[3:]), imports_here=True)
        if words[1:2] == ["-m"] and len(words) > 2:
            if not find_spec(words[2].partition(".")[0]) and not Path(words[2].partition(".")[0]).exists():
                raise ValueError(f"{_EXPECTED}, got no module {words[2]!r}")
            return cls("module", list(words[2:]), imports_here=True)
        if len(words) > 1 and Path(words[1]).is_file():
            return cls("script", list(words[1:]))
        if len(words) > 1 and words[1].endswith(".py"):
            raise ValueError(f"{_EXPECTED}, got no file {words[1]!r}")
        raise ValueError(f"{_EXPECTED}, got {' '.join(words)!r}")


@dataclass
class Part:
    """Describes what one test, or a script, launched, and what was found."""

    name: str
    launched: int = 0
    errors: list[str] = field(default_factory=list)
    """Faults, also those that ended a launch and whose error the program caught."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_found(self) -> bool:
        """Tells whether a kernel has a fault.  A note does not count as a fault."""
        return bool(self.errors)


@dataclass
class ProgramReport:
    """Describes a program's run in the emulator."""

    status: int
    """The program's own exit status."""
    parts: list[Part]
    """The tests that ran, in order; of a script, one part."""
    marks: dict[str, int]
    """Sentences on what did not run as on a GPU, each with the number of calls."""

    @property
    def exit_status(self) -> int:
        """Returns the program's own exit status; INCORRECT if it is 0 and a fault was found."""
        return self.status or (ExitStatus.INCORRECT if any(part.is_found for part in self.parts) else 0)

    @property
    def idle(self) -> list[str]:
        """Returns the names of the parts that launched no kernel."""
        return [part.name for part in self.parts if not part.launched]

    def lines(self) -> list[tuple[str, str | None]]:
        """Returns the report as lines of text, each with its style."""
        lines: list[tuple[str, str | None]] = []
        for part in self.parts:
            lines += [(f"{part.name}: {text}", "red") for text in part.errors]
            lines += [(f"{part.name}: {text}", "yellow") for text in part.notes]
        lines += [(f"{part_name}: launched no kernel", "yellow") for part_name in self.idle]
        lines += [(f"{sentence} ({count}x)", "yellow") for sentence, count in self.marks.items()]
        launched, found = sum(part.launched for part in self.parts), sum(part.is_found for part in self.parts)
        total = (
            f"{launched} launches emulated; {found} of {len(self.parts)} parts with a fault, {len(self.idle)} without"
        )
        return [*lines, (f"{total} a launch; the program's own exit status is {self.status}", None)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        parts = [{**vars(part), "found": part.is_found} for part in self.parts]
        return {"status": self.status, "exit_status": self.exit_status, "parts": parts, "marks": self.marks}


def run(words: Sequence[str], races: bool, schedule: int, views: bool, out_of_the_way: bool = False) -> ProgramReport:
    """Runs a program in a child process, with this process's input and output, and returns the report.

    With `out_of_the_way`, the program's output goes to stderr.  Raises `ValueError` if `words` name no program, and if
    the process ends before it has written its report."""
    program = StrangersProgram.of(words)
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder) / "report.json"
        options = {"races": races, "seed": schedule, "views": views}
        request = {"program": vars(program), "options": options, "report": str(report_file)}
        command = [sys.executable, "-P", "-m", WORKER_MODULE, json.dumps(request, allow_nan=False)]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        ended = subprocess.run(command, env=environment, stdout=sys.stderr if out_of_the_way else None)
        if not report_file.is_file():
            raise ValueError(f"program: expected it to end by itself, got status {ended.returncode} of its process")
        answer = json.loads(report_file.read_text())
    return ProgramReport(answer["status"], [Part(**part) for part in answer["parts"]], answer["marks"])
