"""Counts hardware events with Nsight Compute, on the worst cases of the kernels furthest behind the library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from targets.again import missed_in
from targets.commands import run_command
from targets.target import AcceptanceTarget

from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels._files import write_whole

MOST = 2
"""The number of kernels that are counted: ncu runs a call dozens of times, for ten to thirty seconds."""


def count_worst(context: Context, targets: Sequence[str]) -> EntryOutcome:
    """Counts bytes, pipe use and stalls of the best rung of the two targets that were missed by the largest factor."""
    missed = [one for one in missed_in(context.run, targets).values() if "worst case" in one[0].figures]
    figures: dict[str, Any] = {}
    failed: list[str] = []
    for number, (outcome, records) in enumerate(sorted(missed, key=lambda one: one[0].figures["worst"])[:MOST]):
        case = outcome.figures["worst case"]
        timed = [one for one in records if one.case_id == case and one.role == "optimized" and one.status == "OK"]
        best = min(timed, key=lambda record: record.latency_median_ms or float("inf"))
        words = ["profile", str(best.op), str(best.kernel), "--case", case, "--scheme", str(best.scheme)]
        words += ["--out", str(context.out), "--timeout", f"{max(context.left_s, 1):.0f}", "--json"]
        status, value, errors = run_command(words)
        if status:
            failed.append(f"{best.op}/{best.kernel}: {' '.join(errors.split())[-300:]}")
            continue
        file = context.out / f"counted-{number}-{best.op}-{best.kernel}.json"
        write_whole(file, json.dumps(value, indent=1) + "\n")
        figures[f"{best.op}/{best.kernel} at {case}"] = f"{outcome.figures['worst']:.3f} of the library"
    reason = "; ".join(failed) or ("" if missed else "no target against the library was missed")
    return EntryOutcome("FAILED" if failed else "DONE", reason, figures=figures)


def target_for(targets: Sequence[AcceptanceTarget]) -> AcceptanceTarget:
    """The plan's entry; its value is lower than that of every entry that it can be about."""
    about = [one.id for one in targets if {"cases", "geomean"} <= one.arguments.keys()]
    text = "Nsight Compute on the two kernels that are furthest behind the library"
    ops = tuple(dict.fromkeys(str(one.arguments["op"]) for one in targets if one.id in about))
    return AcceptanceTarget("counted", text, count_worst, {"targets": about}, 60.0, 47.0, checks=ops, on_cpu=False)
