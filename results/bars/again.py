"""Bars against the library that were missed by the launchers' own configs: a search, and the same judgement again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bars.bar import Bar
from bars.measures import cases_of, dispatched, usable

from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.bench.tune.tune import tune_op
from rooflab.kernels import registry

WORST = 4
"""How many cases of a bar are searched: those with the lowest ratios."""


def missed_in(run: Path, names: Sequence[str]) -> dict[str, tuple[EntryOutcome, list[Record]]]:
    """Those of the bars that a run missed, with what came of them and their records."""
    known = state.load(run, names).outcomes
    return {
        name: (known[name], record_files.read(state.folder_of(run, name)))
        for name in names
        if name in known and known[name].bar == "MISSED"
    }


def again(context: Context, bars: Mapping[str, Mapping[str, Any]]) -> EntryOutcome:
    """Searches configs for the worst cases of each missed bar among `bars`, in equal shares of the time.

    `bars` has each bar's arguments by its id.  The bar itself stays missed: it is about the configs that a user gets.
    This says what `rooflab tune` and a change of the launcher would give.
    """
    missed = missed_in(context.run, [*bars])
    figures: dict[str, Any] = {}
    for place, name in enumerate([*missed] or ([*bars][:1] if context.dry_run else [])):
        before = missed[name][1] if name in missed else []
        seconds = context.left_s / (max(len(missed), 1) - place)
        figures[name.removeprefix("bar:")] = _searched(context, bars[name], before, seconds)
    return EntryOutcome("DONE", "" if missed else "no bar against the library was missed", figures=figures)


def _searched(context: Context, bar: Mapping[str, Any], before: list[Record], seconds: float) -> str:
    """What the search gave for a bar, in words."""
    op, rungs = str(bar["op"]), bar.get("rungs", ())
    cases = cases_of(context, op, bar["cases"])
    told = dispatched(op, before, cases)
    ratios = told.by_case if told else {case.id: 1.0 for case in cases}
    worst = sorted(ratios, key=lambda case: ratios[case])[:WORST]
    here = usable(context, op)
    kernels = [
        kernel.name
        for kernel in here
        if kernel.tuning is not None and kernel.role == "optimized" and (not rungs or kernel.name in rungs)
    ]
    if not kernels:
        return "no kernel of it takes a config"
    report = tune_op(
        op, kernels, cases=worst, scheme=None if context.dry_run else bar.get("scheme", "bf16"),
        budget_s=1.0 if context.dry_run else 0.8 * seconds, device=context.device, out=context.out,
        dry_run=context.dry_run, seed=context.seed,
        exclude=[kernel.id for kernel in registry.kernels(op).values() if kernel not in here],
    )  # fmt: skip
    found = dispatched(op, fastest([*before, *report.records]), cases)
    if told is None or found is None:
        return f"{len(report.records)} records, and no ratio over all cases"
    good = found.geomean >= bar["geomean"] and found.worst >= (bar.get("worst") or 0.0)
    change = f"geomean {told.geomean:.3f} -> {found.geomean:.3f}, worst {told.worst:.3f} -> {found.worst:.3f}"
    # A bar with a condition on the cases where the library is slow is not judged by these two alone.
    verdict = "" if "slow_geomean" in bar else ", met" if good else ", missed still"
    return f"{change}{verdict}"


def fastest(records: Sequence[Record]) -> list[Record]:
    """Of each kernel on each case the fastest right record, with whatever config."""
    best: dict[tuple[str | None, str | None], Record] = {}
    for record in records:
        if record.status == "OK" and record.latency_median_ms is not None:
            key = record.kernel, record.case_id
            if key not in best or record.latency_median_ms < (best[key].latency_median_ms or 0.0):
                best[key] = record
    return list(best.values())


def bar_for(bars: Sequence[Bar]) -> Bar:
    """The entry of the plan, behind the bars against the library."""
    about = {one.id: one.arguments for one in bars if {"cases", "geomean"} <= one.arguments.keys()}
    text = "configs searched for the bars against the library that were missed, and judged again"
    ops = tuple(dict.fromkeys(str(arguments["op"]) for arguments in about.values()))
    return Bar("again", text, again, {"bars": about}, 128.0, 73.35, checks=ops, searches=True)
