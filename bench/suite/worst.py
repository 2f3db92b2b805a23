"""What the hardware counts in the kernels that lie furthest behind the library: Nsight Compute on the worst cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rooflab.bench.records import files as record_files
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, Entry, EntryStatus, Outcome
from rooflab.bench.suite.tasks import run_command
from rooflab.kernels._files import write_whole

MOST = 2
"""Kernels that are counted: ncu runs a call dozens of times, for ten to thirty seconds."""


def count_worst(context: Context, bars: Sequence[str]) -> Outcome:
    """Counts bytes, pipe use and stalls of the best rung of each of the two bars that were missed by most."""
    if context.dry_run:
        return Outcome("UNSUPPORTED", "Nsight Compute counts on a GPU only")
    progress = state.load(context.out)
    outcomes = progress.outcomes if progress else {}
    missed = [
        outcomes[name]
        for name in bars
        if name in outcomes and outcomes[name].bar == "MISSED" and "worst case" in outcomes[name].figures
    ]
    figures: dict[str, Any] = {}
    files: list[str] = []
    failed: list[str] = []
    for outcome in sorted(missed, key=lambda found: found.figures["worst"])[:MOST]:
        case = outcome.figures["worst case"]
        timed = [
            record
            for file in outcome.files
            for record in record_files.read(context.out / file)
            if record.case_id == case and record.role == "optimized" and record.status == "OK"
        ]
        best = min(timed, key=lambda record: record.latency_median_ms or float("inf"))
        words = ["profile", str(best.op), str(best.kernel), "--case", case, "--scheme", str(best.scheme)]
        words += ["--out", str(context.out), "--timeout", f"{max(context.left_s, 1):.0f}", "--json"]
        status, value, errors = run_command(words)
        if status:
            failed.append(f"{best.op}/{best.kernel}: {' '.join(errors.split())[-300:]}")
            continue
        files.append(f"counted-{len(files)}-{best.op}-{best.kernel}.json")
        write_whole(context.out / files[-1], json.dumps(value, indent=1) + "\n")
        figures[f"{best.op}/{best.kernel} at {case}"] = f"{outcome.figures['worst']:.3f} of the library"
    ended: EntryStatus = "FAILED" if failed else "DONE"
    reason = "; ".join(failed) or ("" if missed else "no bar against the library was missed")
    return Outcome(ended, reason, figures=figures, files=tuple(files))


def entry_for(bars: Sequence[Entry]) -> Entry:
    """The entry of the plan; of lower value than everything that it can be about."""
    about = [entry.id for entry in bars if {"cases", "geomean"} <= entry.arguments.keys()]
    return Entry(
        "counted", "Nsight Compute on the two kernels that are furthest behind the library", f"{__name__}:count_worst",
        {"bars": about}, 60.0, 47.0, ("environment", "first"),
    )  # fmt: skip
