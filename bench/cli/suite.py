"""Defines the commands `suite`, which runs all useful measurements on a GPU, and `tune`, which searches configs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Json
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for, terminated_as_exception


@app.command()
def suite(
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[PLAN]...", help="More entries, such as results/targets/plan.json.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="An op, a word of ops such as attention, or an entry; repeatable."),
    ] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds; the most valuable entries come first.")] = 480.0,
    out: option.Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="The whole plan on the CPU with small shapes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    trust: Annotated[
        Path | None,
        typer.Option(help="Records of an earlier run: an unchanged kernel that was right there is not checked first."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and run nothing.")] = False,
    summary: Annotated[
        Path | None, typer.Option("--summary", help="Print the results of the run in this folder.")
    ] = None,
    seed: int = 0,
    json: option.Json = False,
) -> None:
    """Run all useful measurements on this machine's GPU, the most valuable first.  Each runs in its own process.

    Exit status 11: an entry failed or a kernel is wrong.  Exit status 13: a measured value cannot be true."""
    from rooflab.bench.suite import state

    if summary is not None:
        _show(state.read_summary(summary))
        return
    if trust is not None and not trust.is_dir():
        raise ValueError(f"trust: expected a folder of records, got {str(trust)!r}")
    from rooflab.bench.core import Environment, pick_device, result_folder
    from rooflab.bench.suite.plan import make_plan
    from rooflab.bench.suite.runner import SuiteSettings, run_suite

    plan_entries = make_plan(only or (), more or (), trust and trust.resolve())
    if plan:
        show.result([plan_entry.to_json() for plan_entry in plan_entries])
        rows = [{"entry": e.id, "value": e.value, "cost_s": e.cost_s, "why": e.title} for e in plan_entries]
        show.table(rows, ("entry", "value", "cost_s", "why"))
        show.line(f"{len(rows)} entries, about {sum(plan_entry.cost_s for plan_entry in plan_entries):.0f} s on a GPU")
        return
    Environment.now()  # refuses what names no commit
    if not dry_run and pick_device(None).type != "cuda":
        raise ValueError("suite: torch finds no CUDA device; --dry-run runs the plan on the CPU with small shapes")
    suite_settings = SuiteSettings(out or result_folder(), budget_s, dry_run, resume, seed, tuple(only or ()))
    with terminated_as_exception(), show.progress("suite", len(plan_entries)) as progress_fn:
        run_suite(plan_entries, suite_settings, show.note, progress_fn)
    results = state.read_summary(suite_settings.out)
    _show(results)
    show.line(f"records, figures and summary: {suite_settings.out}")
    if results["counts"].get("FAILED") or results["excluded"]:
        raise typer.Exit(ExitStatus.INCORRECT)
    if results["invalid"] or not {"DONE", "PARTIAL"} & results["counts"].keys():
        raise typer.Exit(ExitStatus.INVALID)


def _show(results: dict[str, Json]) -> None:
    from rooflab.bench.suite import state

    show.result(results)
    for rows, columns, title in (
        (results["entries"], ("entry", "status", "seconds", "reason"), "Entries"),
        (results["bar_rows"], ("bar", "outcome", "needed", "reason"), "Bars"),
    ):
        if rows:
            show.table([{**row, "reason": state.what(row)} for row in rows], columns, title)
    for kernel, exclude_reason in results["excluded"].items():
        show.line(f"not run any more: {kernel}: {exclude_reason}", "red")
    if results["stopped"]:
        show.line(results["stopped"], "red")
    counts = ", ".join(f"{count} {outcome.lower().replace('_', ' ')}" for outcome, count in results["counts"].items())
    bars_text = ", ".join(f"{count} {outcome.lower()}" for outcome, count in results["bars"].items())
    show.line(f"{results['device']}: {counts}; {f'bars: {bars_text}; ' if bars_text else ''}{results['seconds']:.0f} s")


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="An op with a tunable kernel.")],
    kernel: option.Kernel = None,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="Suites of cases to tune for; repeatable.")] = None,
    case: option.Case = None,
    scheme: Annotated[str | None, typer.Option("--scheme", help="Without it, bf16 on a GPU and fp32 on a CPU.")] = None,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds for the search.")] = 120.0,
    device: option.Device = None,
    choose: Annotated[bool, typer.Option(help="Write kernels/<op>/choices.json, and measure nothing.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="With --choose: choose from the op's records here, of committed trees.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Search with made-up times, on the CPU.")] = False,
    seed: int = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Search the best config of a kernel on this machine's device.

    Exit status 11: a measured config gives wrong results.  A dry run invents times, and checks only the best config."""
    from rooflab.bench.core import read, result_folder
    from rooflab.bench.tune.choose import write_choices
    from rooflab.bench.tune.tune import TABLE_COLUMNS, tune_op

    if choose and records is None:
        raise ValueError("choose: expected --records with it, the measured times")
    if records is not None:
        if not choose:
            raise ValueError("records: expected --choose with it")
        choice_files = write_choices([record for record in read(records, deep=True) if record.op == op])
        if not choice_files:
            raise ValueError(f"records: expected {op}'s, timed and checked on a GPU in bf16; got none in {records}")
        show.result({"written": choice_files})
        for path in choice_files:
            show.line(f"written: {path}")
        return
    folder = out or result_folder()
    tuning_run = tune_op(
        op,
        kernel or [],
        suites=suite or [],
        cases=case or [],
        scheme=scheme,
        budget_s=budget_s,
        device=device,
        out=folder,
        dry_run=dry_run,
        seed=seed,
    )
    show.result({"rows": tuning_run.rows, "files": tuning_run.files, "stopped": tuning_run.stopped})
    show.table(tuning_run.rows, TABLE_COLUMNS)
    if tuning_run.stopped:
        show.line(tuning_run.stopped, "yellow")
    show.line(f"records: {', '.join(str(folder / name) for name in tuning_run.files) or 'none'}")
    record_statuses: set[str] = {record.status for record in tuning_run.records} or {"OK"}
    exit_for(record_statuses | ({result.status for result in tuning_run.results} if dry_run else set()))
