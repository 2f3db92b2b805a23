"""Searches configs for targets that the launchers' own configs missed against the library, and judges them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from targets.measures import cases_of, dispatched, usable
from targets.target import AcceptanceTarget

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.bench.tune.tune import tune_op

WORST = 4
"""The number of cases of a target that are searched: the cases with the lowest ratios."""


def missed_in(run: Path, names: Sequence[str]) -> dict[str, tuple[EntryOutcome, list[Record]]]:
    """The targets that a run missed, each with its outcome and its records."""
    known = state.load(run, names).outcomes
    return {
        name: (known[name], record_files.read(state.folder_of(run, name)))
        for name in names
        if name in known and known[name].bar == "MISSED"
    }


def again(context: Context, targets: Mapping[str, Mapping[str, Any]]) -> EntryOutcome:
    """Searches configs for the worst cases of each missed target among `targets`, in equal shares of the time.

    `targets` has each target's arguments by its id.  The target itself stays missed, because it is about the configs
    that a user gets.  The outcome says what `rooflab tune` and a change of the launcher would give.
    """
    missed = missed_in(context.run, [*targets])
    figures: dict[str, Any] = {}
    for place, name in enumerate([*missed] or ([*targets][:1] if context.dry_run else [])):
        before = missed[name][1] if name in missed else []
        seconds = context.left_s / (max(len(missed), 1) - place)
        figures[name.removeprefix("bar:")] = _searched(context, targets[name], before, seconds)
    return EntryOutcome("DONE", "" if missed else "no target against the library was missed", figures=figures)


def _searched(context: Context, target: Mapping[str, Any], before: list[Record], seconds: float) -> str:
    """Says in words what the search found for a target."""
    op, rungs = str(target["op"]), target.get("rungs", ())
    cases = cases_of(context, op, target["cases"])
    told = dispatched(op, before, cases)
    ratios = told.by_case if told else {case.id: 1.0 for case in cases}
    worst = sorted(ratios, key=lambda case: ratios[case])[:WORST]
    kernels = [
        kernel.name
        for kernel in usable(context, op)
        if kernel.tuning is not None and kernel.role == "optimized" and (not rungs or kernel.name in rungs)
    ]
    if not kernels:
        return "no kernel of it takes a config"
    report = tune_op(
        op,
        kernels,
        cases=worst,
        scheme=None if context.dry_run else target.get("scheme", "bf16"),
        budget_s=1.0 if context.dry_run else 0.8 * seconds,
        device=context.device,
        out=context.out,
        dry_run=context.dry_run,
        seed=context.seed,
    )
    found = dispatched(op, fastest([*before, *report.records]), cases)
    if told is None or found is None:
        return f"{len(report.records)} records, and no ratio over all cases"
    good = found.geomean >= target["geomean"] and found.worst >= (target.get("worst") or 0.0)
    change = f"geomean {told.geomean:.3f} -> {found.geomean:.3f}, worst {told.worst:.3f} -> {found.worst:.3f}"
    # A target with a condition on the cases where the library is slow is not judged by these two alone.
    verdict = "" if "slow_geomean" in target else ", met" if good else ", missed still"
    return f"{change}{verdict}"


def fastest(records: Sequence[Record]) -> list[Record]:
    """For each kernel and case, the fastest right record, with any config."""
    best: dict[tuple[str | None, str | None], Record] = {}
    for record in records:
        if record.status == "OK" and record.latency_median_ms is not None:
            key = record.kernel, record.case_id
            if key not in best or record.latency_median_ms < (best[key].latency_median_ms or 0.0):
                best[key] = record
    return list(best.values())


def target_for(targets: Sequence[AcceptanceTarget]) -> AcceptanceTarget:
    """The plan's entry, which comes after the targets against the library."""
    about = {one.id: one.arguments for one in targets if {"cases", "geomean"} <= one.arguments.keys()}
    text = "configs searched for the targets against the library that were missed, and judged again"
    ops = tuple(dict.fromkeys(str(arguments["op"]) for arguments in about.values()))
    return AcceptanceTarget("again", text, again, {"targets": about}, 128.0, 73.35, checks=ops, searches=True)
