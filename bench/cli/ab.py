"""`ab` and `bisect`: kernels, revisions or records compared, and the commit behind a slowdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, terminated_as_exception

if TYPE_CHECKING:
    from rooflab.bench.ab.modes import AbReport

HELP = """Compare two kernels, two git revisions, or two record files, in pairs of fresh processes.

rooflab ab OP --kernel A --kernel B; rooflab ab [OP] --base REV [--head REV] [--kernel FILE] [--changed];
rooflab ab --records A --records B; rooflab ab --self-test.  Revisions are those of FILE's repository, or of the one
that is the working directory: of Rooflab, or of an installed package with kernels.

Verdicts: FASTER, SLOWER, SAME, UNRESOLVED, INCORRECT, FAILED, MISSING, INVALID. Exit status, the first that applies:
11 INCORRECT or FAILED, 13 INVALID or MISSING or nothing compared (or UNRESOLVED where three times the threshold could
not be seen), 10 SLOWER, 12 UNRESOLVED with --strict, 0; 2 is bad usage."""


@app.command("ab", help=HELP)
def ab(
    op: Annotated[list[str] | None, typer.Argument(help="Ops; without one, all that both sides have.")] = None,
    kernel: option.Kernel = None,
    base: Annotated[str | None, typer.Option(help="The revision that is side A.")] = None,
    head: Annotated[str | None, typer.Option(help="The revision that is side B; the working tree without it.")] = None,
    changed: Annotated[bool, typer.Option("--changed", help="With --base: only ops that the difference touches.")] = (
        False
    ),
    records: Annotated[list[Path] | None, typer.Option(help="A file or folder of records; give it twice.")] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Test the A/B itself on equal and slowed code.")] = (
        False
    ),
    suite: Annotated[
        str | None,
        typer.Option(
            help="Suite of cases; without one, the cases with most FLOPs and most bytes of smollm2_135m on a CPU, of "
            "llama3_8b on a GPU. A self-test takes a suite's last case."
        ),
    ] = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    device: option.Device = None,
    pairs: Annotated[int, typer.Option(help="Pairs of processes, and again as many to confirm.")] = 12,
    threshold: Annotated[float, typer.Option(help="Smallest relative change that matters; 0.02 is 2%.")] = 0.02,
    floor_us: Annotated[float, typer.Option(help="Smallest change in microseconds that matters.")] = 0.5,
    budget_s: Annotated[float | None, typer.Option("--budget", help="Seconds for the whole run.")] = None,
    kernel_s: Annotated[float, typer.Option("--kernel-seconds", help="Seconds for one kernel in one process.")] = 0.3,
    seed: option.Seed = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 12 on UNRESOLVED, and where a self-test could see nothing.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="With --self-test: A/A runs.")] = 1,
    inject: Annotated[float | None, typer.Option(help="With --self-test: slowdown; 0.2 on a CPU, 0.05 on CUDA.")] = (
        None
    ),
    junit: Annotated[Path | None, option.file(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, option.file(help="Write Markdown here, for a step summary or a comment.")] = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """The command; `HELP` is its text."""
    from rooflab.bench.ab import modes
    from rooflab.bench.ab.pairs import AbSettings
    from rooflab.bench.ab.sides import Wanted
    from rooflab.bench.ab.verdict import Rules
    from rooflab.bench.core import pick_device

    place = str(pick_device(device))
    settings = AbSettings(Rules(threshold, floor_us * 1e-6), pairs, budget_s, kernel_s, seed, place)
    wanted = Wanted(tuple(op or ()), tuple(kernel or ()), tuple(case or ()), suite, tuple(scheme or ()), place)
    for name, revision in (("base", base), ("head", head)):
        if revision is not None and not revision.strip():
            raise ValueError(f"{name}: expected a revision, got {revision!r}; is the variable that names it set?")
    named = [name for name, given in (("--base", base), ("--records", records), ("--self-test", self_test)) if given]
    if len(named) > 1:
        raise ValueError(f"ab: expected one of --base, --records and --self-test, got {' and '.join(named)}")
    if not base and (head or changed):
        raise ValueError("head: expected --base with --head and --changed")
    with show.waiting("comparing"), terminated_as_exception():
        if records:
            report = modes.of_records(records, settings.rules, wanted)
        elif self_test:
            report = modes.of_self_test(wanted, settings, repeats, inject, out, show.note)
        elif base:
            report = modes.of_revisions(base, head, changed, wanted, settings, out, show.note)
        else:
            report = modes.of_kernels(wanted, settings, out, show.note)
    status = report.exit_status(strict)
    report.write(junit, markdown, strict)
    show.result(report.as_mapping() | {"exit_status": status})
    _draw(report, status)
    raise typer.Exit(status)


def _draw(report: AbReport, status: int) -> None:
    from rooflab.bench.ab import output

    for title, outcomes in report.tables:
        rows = [output.row(outcome) for outcome in outcomes]
        show.table(rows, output.COLUMNS, title, filled=True)
        show.line(output.power(outcomes))
    for note in report.notes:
        show.line(note, "dim")
    for fault in report.faults:
        show.line(fault, "red")
    show.line(f"{output.summary(report.outcomes)}: exit status {status}")


@app.command()
def bisect(
    op: option.OpName,
    good: Annotated[str, typer.Option("--good", help="A revision that is fast, and is compared with at each step.")],
    bad: Annotated[str, typer.Option("--bad", help="A later revision that is slow.")],
    kernel: Annotated[str | None, typer.Argument(help="A kernel of the op; without one, all.")] = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    threshold: Annotated[float | None, typer.Option(help="Smallest relative change that counts, as in an A/B.")] = None,
    pairs: Annotated[int, typer.Option(help="Pairs of processes in one A/B; doubled where it cannot tell.")] = 12,
    correctness: Annotated[
        bool, typer.Option("--correctness", help="Count a kernel that fails or is incorrect as bad.")
    ] = False,
    repo: Annotated[Path, typer.Option("--repo", help="The checkout to bisect.")] = Path("."),
    json: option.Json = False,
) -> None:
    """Print the lines with which `git bisect run` finds the commit that made a kernel slower."""
    from rooflab.bench.ab.bisection import bisect_lines

    words = [op, *(("--kernel", kernel) if kernel else ())]
    words += [word for text in case or () for word in ("--case", text)]
    words += [word for text in scheme or () for word in ("--scheme", text)]
    words += ["--threshold", str(threshold)] if threshold is not None else []
    lines = bisect_lines(words, good, bad, repo, pairs=pairs, correctness=correctness)
    show.result({"lines": lines})
    for line in lines:
        show.line(line)
