"""Reads the log of ptxas, the assembler of PTX."""

from __future__ import annotations

import re

_ERROR = re.compile(r"^ptxas(?:-blackwell)? (?:\S*, line (\d+); )?(?:error|fatal)\s*: (.*)$", re.MULTILINE)


def errors_of(log: str) -> str:
    """Returns the errors in a log of ptxas, each on a line of its own, without files and the command.

    Returns the whole log if it has no error in ptxas's form."""
    lines = [f"ptxas: {f'line {number} of the PTX: ' if number else ''}{text}" for number, text in _ERROR.findall(log)]
    return "\n".join(lines) or log.strip()
