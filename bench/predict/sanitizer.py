"""Compute Sanitizer over one call of a kernel: memory errors, races, uninitialised reads, misused barriers.

A run counts as clean only where the tool printed a summary of zero and the call came to its end: a tool that died, or a
call that never ran, is no clean run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
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
_PREFIX = "========= "
_HEADLINE = re.compile(
    r"^(?:Error: |Warning: )?(?:Invalid |Misaligned |Uninitialized |Race reported|Potential |Barrier error|Program hit|"
    r"Fatal UVM|Leaked |Unused |Out-of-|Device[- ]|Stack overflow|Illegal )"
)
_SUMMARY = re.compile(
    r"(ERROR|RACECHECK|INITCHECK|SYNCCHECK) SUMMARY: (\d+) (?:errors?|hazards?)\b(?! were not printed)"
)
_KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:[^\s:]+:\d+:)?(?:void )?([A-Za-z_][\w:<>~]*)")
_THREAD = re.compile(r"by thread (\(\d+,\d+,\d+\)) in block (\(\d+,\d+,\d+\))")


@dataclass(frozen=True)
class Finding:
    """One thing that the tool reported."""

    what: str
    """Its headline: `Invalid __global__ write of size 4 bytes`."""
    kernel: str
    """The function it happened in; empty where the tool names none."""
    where: str
    """Thread and block of the first access; empty for a race, which is between several."""
    text: str
    """All that the tool printed of it."""


@dataclass(frozen=True)
class Report:
    """What one tool says of one call."""

    tool: Tool
    count: int
    """Errors or hazards, those not printed included."""
    findings: tuple[Finding, ...]
    """Those that were printed."""

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
        *arguments(target.op, target.kernel, target.case, target.scheme.name, seed, 0, target.file),
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
    summaries = [int(number) for _, number in _SUMMARY.findall(output)]
    findings = tuple(_findings(output))
    count = max([*summaries, len(findings)])  # a summary of several processes' runs: the worst of them
    if count:
        return Report(tool, count, findings)
    if status == FOUND_STATUS:
        raise ValueError(f"sanitizer: {tool} ended with the status for findings and printed none: {last_words(output)}")
    if not summaries or MARK not in output or status != 0:
        raise ValueError(f"sanitizer: {tool} did not come to its end (status {status}): {last_words(output)}")
    return Report(tool, 0, ())


def _findings(output: str) -> list[Finding]:
    lines = [line.removeprefix(_PREFIX) for line in output.splitlines() if line.startswith(_PREFIX)]
    found: list[list[str]] = []
    for line in lines:
        if _HEADLINE.match(line):
            found.append([line])
        elif found and line.startswith("  "):
            found[-1].append(line)
    return [_finding(block) for block in found]


def _finding(block: Sequence[str]) -> Finding:
    text = "\n".join(line.rstrip() for line in block)
    kernel, thread = _KERNEL.search(text), _THREAD.search(text)
    return Finding(
        what=block[0].strip().split(" access at ")[0] if "Race reported" in block[0] else block[0].strip(),
        kernel=kernel[1] if kernel else "",
        where=f"thread {thread[1]}, block {thread[2]}" if thread else "",
        text=text,
    )
