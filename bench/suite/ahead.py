"""Compiles what later entries launch, while an earlier entry has the card: `python -m rooflab.bench.suite.ahead`.

An entry is rehearsed: its own function runs with the device `meta`, where it compiles what it would otherwise check and
time (`rehearse.py`).  The compilers' caches on disk pass the code on to the entry's own process.  The command compiles
the whole plan and says how long each entry's compilation takes; it needs no GPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rooflab.bench import show
from rooflab.bench.compile.worker import FAILURES
from rooflab.bench.processes.child import Pool, command_for, cores, environment_without
from rooflab.bench.suite.entries import Context
from rooflab.bench.suite.plan import make_plan
from rooflab.bench.suite.rehearse import compiled
from rooflab.bench.suite.worker import find

ITSELF = "rooflab.bench.suite.ahead"
LIMIT_S = 600.0
"""Seconds for one entry; the check of every kernel of attention takes a third of it on one core."""
LOWEST = 19
"""The priority: a core is taken only from nobody."""


def compilers() -> Pool:
    """Processes on half of the cores, at most four; the rest is for the entry that has the card."""
    environment = environment_without("TRITON_INTERPRET") | {"CUDA_VISIBLE_DEVICES": ""}
    return Pool(command_for(ITSELF), environment, LIMIT_S, max(1, cores() // 2))


def compile_entries(entries: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Compiles what these entries of the plan launch, or all of them: a row for each that checks or times an op."""
    asked = [
        {"entry": entry.id, "call": entry.call, "arguments": dict(entry.arguments)}
        for entry in make_plan()
        # A search of configs compiles for itself.
        if "op" in entry.arguments and not entry.call.endswith(":tune") and (entries is None or entry.id in entries)
    ]
    pool = compilers()
    try:
        told = list(pool.ask_all(asked))
    finally:
        pool.stop()
    rows = [found if isinstance(found, dict) else {"failed": str(found)} for found in told]
    return [{"entry": request["entry"], **row} for request, row in zip(asked, rows, strict=True)]


def answer(request: Mapping[str, Any]) -> Any:
    """Of one entry, the kernels that were new to this process and the seconds of their compilation; of the suite's
    list of `entries`, all of that."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    if "entries" in request:
        return compile_entries(request["entries"])
    began, before = time.monotonic(), len(compiled)
    context = Context(request["entry"], Path(os.devnull), "meta", dry_run=False, seconds=math.inf)
    with suppress(*FAILURES):  # what the entry makes of its records, which are none
        find(request["call"])(context, **request["arguments"])
    return {"kernels": len(compiled) - before, "seconds": time.monotonic() - began}


def main() -> None:
    """Prints a row for each entry of the plan: its kernels and the seconds of their compilation."""
    began = time.monotonic()
    rows = compile_entries()
    show.table(rows, ("entry", "kernels", "seconds", "failed"))
    total = sum(row.get("seconds", 0.0) for row in rows)
    show.line(f"{total:.0f} s of a core, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
