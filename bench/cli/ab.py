"""Defines the command `ab`, which compares two kernels, two git revisions, or two files of measurement records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, terminated_as_exception

if TYPE_CHECKING:
    from rooflab.bench.ab.modes import AbReport

HELP = """Compare two kernels, two git revisions, or two files of records, in pairs of fresh processes.

Kernels: rooflab ab OP --kernel A --kernel B.  Records: rooflab ab --records A --records B.  Revisions: rooflab ab [OP]
--base REV [--head REV] [--kernel FILE] [--changed], in the repository of FILE or of the working directory, which is
Rooflab's or that of an installed package with kernels.  The A/B itself: rooflab ab --self-test.

Verdicts: FASTER, SLOWER, SAME, UNRESOLVED, INCORRECT, FAILED, MISSING, INVALID.  The exit status is the first that
applies: 2 for bad usage; 11 for INCORRECT or FAILED; 13 for INVALID, MISSING or nothing compared, and for an
UNRESOLVED that cannot see three times the threshold; 10 for SLOWER; 12 for UNRESOLVED with --strict; else 0."""


@app.command("ab", help=HELP)
def ab(
    op: Annotated[list[str] | None, typer.Argument(help="Ops; without one, all that both sides have.")] = None,
    kernel: option.Kernel = None,
    base: Annotated[str | None, typer.Option(help="The revision that is side A.")] = None,
    head: Annotated[str | None, typer.Option(help="The revision that is side B; without it, the working tree.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="With --base: only ops that the changed files touch.")] = (
        False
    ),
    records: Annotated[list[Path] | None, typer.Option(help="A file or folder of records; give it twice.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Test the A/B itself on equal and slowed code.")] = (
        False
    ),
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite of cases; without one, the case with the most FLOPs and the case with the most bytes, of "
            "smollm2_135m on a CPU and of llama3_8b on a GPU. A self-test takes the suite's last case."
        ),
    ] = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    device: option.Device = None,
    pairs: Annotated[int, typer.Option(help="Pairs of processes; the same number confirms a difference.")] = 12,
    threshold: Annotated[float, typer.Option(help="Smallest relative change that matters; 0.02 is 2%.")] = 0.02,
    floor_us: Annotated[float, typer.Option(help="Smallest change that matters, in microseconds.")] = 0.5,
    budget_s: Annotated[float | None, typer.Option("--budget", help="Limit of the whole run in seconds.")] = None,
    kernel_s: Annotated[float, typer.Option("--kernel-seconds", help="Seconds for one kernel in one process.")] = 0.3,
    seed: option.Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 12 on UNRESOLVED, and if a self-test saw no slowdown.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="With --self-test: number of runs on identical code.")] = 1,
    inject: Annotated[float | None, typer.Option(help="With --self-test: slowdown; 0.2 (CPU) or 0.05 (GPU).")] = (None),
    junit: Annotated[Path | None, option.file(help="Write the verdicts as JUnit XML to this file.")] = None,
    markdown: Annotated[Path | None, option.file(help="Write the verdicts as Markdown to this file.")] = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Runs the command `ab`.  The constant `HELP` holds the help text."""
    from rooflab.bench.ab import modes
    from rooflab.bench.ab.pairs import AbSettings
    from rooflab.bench.ab.sides import Subset
    from rooflab.bench.ab.verdict import Rules
    from rooflab.bench.core import pick_device

    device_name = str(pick_device(device))
    ab_settings = AbSettings(Rules(threshold, floor_us * 1e-6), pairs, budget_s, kernel_s, seed, device_name)
    ab_subset = Subset(tuple(op or ()), tuple(kernel or ()), tuple(case or ()), suite, tuple(scheme or ()), device_name)
    for name, revision in (("base", base), ("head", head)):
        if revision is not None and not revision.strip():
            raise ValueError(f"{name}: expected a revision, got {revision!r}; is the variable that names it set?")
    given_options = [
        name for name, opt_value in (("--base", base), ("--records", records), ("--self-test", self_test)) if opt_value
    ]
    if len(given_options) > 1:
        raise ValueError(f"ab: expected one of --base, --records and --self-test, got {' and '.join(given_options)}")
    if not base and (head or changed):
        raise ValueError("head: expected --base with --head and --changed")
    with show.waiting("comparing"), terminated_as_exception():
        if records:
            ab_report = modes.of_records(records, ab_settings.rules, ab_subset)
        elif self_test:
            ab_report = modes.of_self_test(ab_subset, ab_settings, repeats, inject, out, show.note)
        elif base:
            ab_report = modes.of_revisions(base, head, changed, ab_subset, ab_settings, out, show.note)
        else:
            ab_report = modes.of_kernels(ab_subset, ab_settings, out, show.note)
    exit_code = ab_report.exit_status(strict)
    ab_report.write(junit, markdown, strict)
    show.result(ab_report.as_mapping() | {"exit_status": exit_code})
    _draw(ab_report, exit_code)
    raise typer.Exit(exit_code)


def _draw(report: AbReport, status: int) -> None:
    from rooflab.bench.ab import output

    for table_title, kernel_outcomes in report.tables:
        rows = [output.row(kernel_outcome) for kernel_outcome in kernel_outcomes]
        show.table(rows, output.COLUMNS, table_title, filled=True)
        show.line(output.power(kernel_outcomes))
    for report_note in report.notes:
        show.line(report_note, "dim")
    for fault_text in report.faults:
        show.line(fault_text, "red")
    show.line(f"{output.summary(report.outcomes)}: exit status {status}")
