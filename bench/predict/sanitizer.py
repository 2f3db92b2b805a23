"""Compute Sanitizer over one call of a kernel: memory errors, races, uninitialised reads, misused barriers.

A run counts as clean only where the tool printed a summary of zero and the call came to its end: a tool that died, or a
call that never ran, is no clean run.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from rooflab.bench.predict.cases import Target
from rooflab.bench.predict.launch_once import MARK, arguments
from rooflab.bench.predict.ncu import find_tool, last_words, watch

Tool = Literal["memcheck", "racecheck", "initcheck", "synccheck"]
FOUND_STATUS = 86
"""The exit status asked for where something was found, so that the program's own does not hide it."""
PRINTED = 100
"""Findings printed at most; the summary counts all."""
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were not printed)")


@dataclass(frozen=True)
class Report:
    """What one tool says of one call."""

    tool: Tool
    count: int
    """Errors or hazards, those not printed included."""
    lines: tuple[str, ...]
    """What the tool printed."""

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return self.count == 0


def command(target: Target, tool: Tool, seed: int, sanitizer: str = "compute-sanitizer") -> list[str]:
    """The whole command line."""
    # torch asks the driver for symbols that it may lack; memcheck would report each refusal as an error.
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return [
        *(sanitizer, "--tool", tool, "--error-exitcode", str(FOUND_STATUS), "--print-limit", str(PRINTED), *quiet),
        sys.executable,
        *arguments(target, seed, 0),
    ]


def check_tool(name: str) -> Tool:
    """`name` if it is one of the tools.  Raises `ValueError` naming them."""
    for tool in get_args(Tool):
        if name == tool:
            found: Tool = tool
            return found
    raise ValueError(f"sanitizer: expected one of {', '.join(get_args(Tool))}, got {name!r}")


def run(target: Target, tool: Tool, seed: int = 0, timeout_s: float = 600.0) -> Report:
    """Runs one call of `target` under `tool` on the GPU at hand.

    torch's caching allocator is off, because inside a cached block no access is out of bounds.  Raises `ValueError` in
    one sentence where the tool is missing, or its run says nothing.
    """
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None:
        raise ValueError(
            "sanitizer: expected compute-sanitizer on the PATH or in /usr/local/cuda, found none; it comes with the "
            "CUDA toolkit"
        )
    line = command(target, tool, seed, sanitizer)
    done = watch("sanitizer", line, timeout_s, "try a smaller --case", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return read(done.stdout + "\n" + done.stderr, tool, done.returncode)


def read(output: str, tool: Tool, status: int) -> Report:
    """The report in what the tool printed.  Raises `ValueError` where its run was cut short and found nothing."""
    summaries = [int(number) for number in _SUMMARY.findall(output)]
    if any(summaries):  # of several processes' runs, the worst
        return Report(tool, max(summaries), tuple(line for line in output.splitlines() if line.startswith("=====")))
    if status == FOUND_STATUS:
        raise ValueError(f"sanitizer: {tool} ended with the status for findings and counted none: {last_words(output)}")
    if not summaries or MARK not in output or status != 0:
        raise ValueError(f"sanitizer: {tool} did not come to its end (status {status}): {last_words(output)}")
    return Report(tool, 0, ())
