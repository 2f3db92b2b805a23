"""Defines the commands `list`, `check`, `bench` and `roofline`, which work on single kernels."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Row
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, begin_run, exit_for
from rooflab.bench.cli.names import cuda_device_present
from rooflab.bench.core import Pool
from rooflab.roofline.numbers import counted

CHECK_LIMIT_S = 90.0
"""The default time limit in seconds: after it, no further check of an op begins."""

if TYPE_CHECKING:
    from rooflab.bench.core import Checkers, CheckResult


@app.command("list")
def list_kernels(
    op: option.Op = None,
    kernel: option.Kernel = None,
    ladder: Annotated[bool, typer.Option("--ladder", help="Show each rung of an op: its change and its file.")] = False,
    json: option.Json = False,
) -> None:
    """List every kernel, and say why it can or cannot run here.  For one op also show its signature and arguments."""
    from rooflab.bench.commands import kernel_rows
    from rooflab.bench.core import choose_kernels
    from rooflab.bench.report.ladders import ladder_rows
    from rooflab.kernels.registry import get_op

    if ladder:
        if op is None:
            raise ValueError("op: expected one with --ladder, got none")
        show.result(ladder_lines := ladder_rows(op))
        return show.table(ladder_lines, ("rung", "backend", "line", "code"))
    kernel_ids = [kernel_item.id for kernel_item in choose_kernels(op, kernel)] if kernel else None
    rows = kernel_rows([op] if op else None)
    if kernel_ids is not None:
        rows = [row for row in rows if f"{row['op']}/{row['name']}" in kernel_ids]
    show.result(rows)
    show.table(rows, ("op", "name", "role", "backend", "available", "reason"))
    if op and not kernel:
        op_spec = get_op(op)
        show.line(f"\n{op_spec.call()}", "bold")
        show.pairs([] if op_spec.contract is None else op_spec.contract.rows())
        show.line(f"a case: {op_spec.cases['smoke'][0].id}; it may add {', '.join(op_spec.optional) or 'no key'}")


@app.command()
def check(
    op: option.Op = None,
    kernel: option.Kernel = None,
    suite: option.Suite = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    device: option.Device = None,
    seed: Annotated[int | None, typer.Option(help="Seed of inputs and drawn cases; random without it.")] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Without a GPU: emulator (compiled code; the default), or interpreter (Triton's)."),
    ] = None,
    seconds: Annotated[
        float | None,
        option.seconds(
            help=f"Seconds for each op, after which no check starts; {CHECK_LIMIT_S:.0f} if cases are drawn."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Make every check, without a limit of time.")] = False,
    out: option.Out = None,
    resume: option.Resume = False,
    json: option.Json = False,
) -> None:
    """Check kernels against an fp64 reference.  Exit status 11: a kernel is wrong; 12: a kernel was not checked at all.

    Without --case and --suite, the op's own test cases run first, then random valid cases; --seed decides which."""
    _check_options(op, by, every, seconds)
    with show.waiting("loading torch and the kernels"):
        from rooflab.bench.checks.checking import run_checks, summarize_checks
        from rooflab.bench.checks.drawn import drawn_checks, listed_checks
        from rooflab.bench.core import Checkers, Selection
        from rooflab.bench.emulate import emulators

        seed = secrets.randbelow(2**31) if seed is None else seed
        chosen_kernels = Selection.of(op, kernel, suite or ["smoke", "edge"], case, scheme, device, seed)
        random_cases = not (case or suite)
        checks = drawn_checks(chosen_kernels, every) if random_cases else listed_checks(chosen_kernels)
        writer, earlier_records = begin_run(out, resume) if out or resume else (None, [])
        finished_keys = {(record.op, record.kernel, record.case_id, record.scheme) for record in earlier_records}
        checks = [i for i in checks if (i.kernel.op, i.kernel.name, i.case.id, i.scheme.name) not in finished_keys]
    use_emulator = by != "interpreter" and chosen_kernels.device.type == "cpu"
    if by == "emulator" and not use_emulator:
        raise ValueError("by: the emulator checks with no GPU; expected --device cpu with it")
    check_limit_s = (
        math.inf if every or not (random_cases or seconds) else (seconds or CHECK_LIMIT_S) * len(chosen_kernels.kernels)
    )
    show.note(f"seed {seed}")
    kernel_names = [kernel.id for op_kernels in chosen_kernels.kernels.values() for kernel in op_kernels]
    kernels_text = ", ".join(kernel_names) if len(chosen_kernels.kernels) == 1 else counted(len(kernel_names), "kernel")
    show.note(f"{counted(len(checks), 'check')} of {kernels_text}; first their processes start")
    kernel_checkers = Checkers(chosen_kernels.device, emulators() if use_emulator else None)
    result_by_index: dict[int, CheckResult] = {}
    was_interrupted = False
    try:
        with show.progress("check", len(checks), lines=True) as progress_fn:
            result_printer = lambda found: progress_fn(found.line)
            run_checks(checks, kernel_checkers, writer, result_printer, limit_s=check_limit_s, into=result_by_index)
    except KeyboardInterrupt:
        was_interrupted = True
    results = [result_by_index[check_index] for check_index in sorted(result_by_index)]
    rows = summarize_checks(results, checks)
    _show_checks(results, rows)
    left_out_text = f"{len(checks) - len(results)} of {counted(len(checks), 'check')}"
    if was_interrupted:
        show.error(f"interrupted: {left_out_text} left out")
        raise typer.Exit(ExitStatus.INTERRUPTED)
    if len(results) < len(checks):
        done_text = f"{len(results) / len(checks):.0%} of the plan was run"
        show.note(f"{done_text}; left out after {check_limit_s:g} s: {left_out_text}; --all makes them")
    if random_cases:
        show.note("all of the plan was run" if len(result_by_index) == len(checks) else None)
    _show_faults(results, kernel_checkers, check_limit_s / 3)
    has_unchecked = _show_unchecked(rows, check_limit_s, use_emulator)
    check_statuses: set[str] = {*(result.status for result in results), *(record.status for record in earlier_records)}
    exit_for(check_statuses, undecided=has_unchecked or (resume and len(results) < len(checks)))


def _show_unchecked(rows: Sequence[Row], limit_s: float, use_emulator: bool) -> bool:
    """Names the kernels that no run has judged, and says what helps.  Returns whether there are any."""
    if unchecked_kernels := [f"{row['op']}/{row['kernel']}" for row in rows if row["unknown"]]:
        show.error(f"not checked at all: {', '.join(unchecked_kernels)}")
    if any(row["unknown"] and not row["not run"] for row in rows):
        faster_text = ", or --by interpreter, which is faster" if use_emulator else ""
        show.error(f"the first check takes longer than {limit_s:g} s; give more --seconds{faster_text}")
    return bool(unchecked_kernels)


def _check_options(op: str | None, by: str | None, every: bool, seconds: float | None) -> None:
    if op and "::" in op:
        raise ValueError(f"op: expected one of Rooflab's; `rooflab emulate {op}` judges any launcher of Triton")
    if by not in (None, "emulator", "interpreter"):
        raise ValueError(f"by: expected emulator or interpreter, got {by!r}")
    if every and seconds is not None:
        raise ValueError("seconds: expected none with --all")


def _show_faults(results: Sequence[CheckResult], check: Checkers, limit_s: float) -> None:
    from rooflab.bench.checks.checking import size_of, smallest_failures
    from rooflab.bench.core import NOT_RUN

    failure_by_kernel: dict[tuple[str, str], CheckResult] = {}
    for row in sorted((row for row in results if row.status not in ("OK", *NOT_RUN)), key=size_of):
        failure_by_kernel.setdefault((row.op, row.kernel), row)
    for rerun_command in smallest_failures([*failure_by_kernel.values()], check, limit_s):
        show.note(f"again: {rerun_command}")


def _show_checks(results: Sequence[CheckResult], rows: Sequence[Row]) -> None:
    from rooflab.bench.checks.checking import check_rows
    from rooflab.bench.core import NOT_RUN

    show.result(check_rows(results))
    columns = ("op", "kernel", "role", "ok", "failed", "not run", "left out", "checked_by", "worst", "weak", "reason")
    show.table(rows, columns)
    for op, name in dict.fromkeys((result.op, result.kernel) for result in results):
        kernel_results = [result for result in results if (result.op, result.kernel) == (op, name)]
        for row in check_rows(result for result in kernel_results if result.status not in ("OK", *NOT_RUN)):
            show.failure(row)
    unsupported_count = sum(result.not_offered for result in results)
    for op, name in dict.fromkeys((row.op, row.kernel) for row in results if row.not_offered):
        reasons = [row.reason for row in results if row.not_offered and (row.op, row.kernel) == (op, name)]
        refusals = dict.fromkeys(re.sub(f"^.*{op}/{name}:? ?|,? got .*", "", refusal_text) for refusal_text in reasons)
        show.line(f"not offered by {op}/{name}: {'; '.join(refusals)}")
    show.line(
        f"{counted(len(results), 'check')}: {sum(row['ok'] for row in rows)} right, "
        f"{sum(row['failed'] for row in rows)} wrong, {unsupported_count} not offered by the kernel, "
        f"{sum(row['not run'] for row in rows) - unsupported_count} could not run here"
    )


@app.command()
def bench(
    op: option.Op = None,
    kernel: option.Kernel = None,
    suite: option.Suite = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    device: option.Device = None,
    seed: option.Seed = 0,
    budget_s: Annotated[float, typer.Option("--budget", help="Seconds for one kernel on one case.")] = 0.5,
    seconds: Annotated[
        float | None, option.seconds(help="Seconds for the whole run; cases that have not begun by then are left out.")
    ] = None,
    out: option.Out = None,
    resume: option.Resume = False,
    json: option.Json = False,
) -> None:
    """Check and time kernels.  Exit status 11: a kernel is wrong; 12: some cases did not run; 13: a time is NOISY."""
    Pool.of_kernels(device == "cpu" or not cuda_device_present()).begin()  # it imports torch while this process does
    with show.waiting("loading torch and the kernels"):
        from rooflab.bench.commands import count_benches, run_benches
        from rooflab.bench.core import ContextBroken, Selection, Settings
        from rooflab.bench.report.figures import bench_row, draw_records

    choice = Selection.of(op, kernel, suite or ["smollm2_135m"], case, scheme, device, seed)
    writer, records = begin_run(out, resume)
    folder, record_count, was_interrupted = writer.path.parent, count_benches(choice), False
    config = Settings(device=str(choice.device), seed=seed, budget_s=budget_s, limit_s=seconds or math.inf)
    try:
        with show.progress("bench", record_count - len(records)) as progress_fn:
            run_benches(choice, config, writer, progress_fn, records)
    except KeyboardInterrupt:
        was_interrupted = True
    except ContextBroken as broken:
        show.error(f"the rest needs a fresh process: {broken}")
        raise typer.Exit(ExitStatus.BROKEN) from broken
    rows = [bench_row(record) for record in records]
    show.bench_table(rows)  # before anything is drawn, which may fail
    figure_paths = draw_records(records, folder) if not was_interrupted else []
    show.result({"folder": folder, "files": figure_paths, "rows": rows})
    show.line(f"{'records and figures' if figure_paths else 'records'}: {folder}")
    for path in figure_paths:
        show.line(f"  {path.name}")
    left_out_text = f"{record_count - len(records)} of {counted(record_count, 'result')} left out"
    if was_interrupted:
        show.error(f"interrupted: {left_out_text}")
        raise typer.Exit(ExitStatus.INTERRUPTED)
    if len(records) < record_count:
        show.error(left_out_text)
    exit_for({record.status for record in records}, undecided=len(records) < record_count)


@app.command()
def roofline(
    records: Annotated[
        Path | None, typer.Argument(help="Records to draw, a file or folder; without it, the newest local run.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Draw what this GPU could reach; it need not be here.")] = None,
    op: option.OnlyOp = None,
    kernel: option.Kernel = None,
    case: option.OnlyCase = None,
    all_cases: Annotated[bool, typer.Option("--all", help="Draw every case, not only each op's largest.")] = False,
    suite: Annotated[
        str, typer.Option(help="With --gpu: the suite whose largest case of each op is drawn.")
    ] = "llama3_8b",
    scheme: Annotated[str, typer.Option(help="With --gpu: dtypes of the inputs.")] = "bf16",
    run: Annotated[
        list[str] | None, typer.Option(help="Part of a run's id: draw this run's readings, not the newest; repeatable.")
    ] = None,
    across: Annotated[
        bool, typer.Option("--across-devices", help="Draw all machines in one figure, each under its own roofs.")
    ] = False,
    fixed_axes: Annotated[
        bool, typer.Option("--fixed-axes", help="Set the axes by the roofs, so that two figures can be compared.")
    ] = False,
    out: Annotated[
        Path | None, option.place(metavar="PLACE", help="Folder for the figures, or a file, x.svg or x.png.")
    ] = None,
    json: option.Json = False,
) -> None:
    """Draw a roofline plot of measured records.  With --gpu, draw the lower bounds of kernels' times on that GPU.

    Each machine gets a figure, with the newest reading of each kernel and input case.  JSON of pytest-benchmark can be
    drawn too, if each test gives a cost to the fixture kernel_benchmark.  With --gpu, other GPUs' times are omitted."""
    from rooflab.bench import commands
    from rooflab.bench.core import choose_kernels, result_folder
    from rooflab.bench.report import figures

    kernels = choose_kernels(op[0] if op and len(op) == 1 else None, kernel) if kernel else []
    ids, op = {item.id for item in kernels}, op or list({item.op for item in kernels})
    if gpu and (run or (case and not records)):
        raise ValueError(f"gpu: expected no --{'run' if run else 'case'} with it, for nothing was measured there")
    if gpu and not records:
        chart, plot_note = commands.gpu_bounds(gpu, suite, scheme, op or [])
        show.note(plot_note)
        points = [point for point in chart.points if not ids or point.published or f"{point.op}/{point.label}" in ids]
        plots = [replace(chart, points=points)] if points else []
        skip_reason = figures.why_nothing([])
    else:
        readings, folder = commands.newest_records(records)
        readings = [item for item in readings if (not op or item.op in op) and (not case or item.case_id in case)]
        readings = [item for item in readings if not ids or f"{item.op}/{item.kernel}" in ids]
        if gpu and records:
            chart, plot_notes = commands.records_on(gpu, readings, records.name)
            plots = [chart]
            for plot_note in plot_notes:
                show.note(plot_note)
        else:
            plots = figures.drawings(readings, all_cases or bool(case), run or (), across)
        skip_reason = figures.why_nothing(readings)
    if not plots:
        raise ValueError(f"records: {skip_reason}, so there is nothing to draw")
    if len(plots) > 1 and out is not None and out.suffix in (".svg", ".png"):
        raise ValueError(f"out: expected a folder or --across-devices, for {len(plots)} figures, got {str(out)!r}")
    out_path = out or (result_folder() if gpu else folder)
    image_paths = [path for chart in plots for path in figures.draw(chart, out_path, fixed_axes)]
    points = [point for chart in plots for point in chart.points]
    skip_reasons = list(dict.fromkeys(skip_reason for chart in plots for skip_reason in chart.unplaced))
    no_bytes_kernels = [
        skip_reason.removesuffix(f": {figures.NO_BYTES_REASON}")
        for skip_reason in skip_reasons
        if skip_reason.endswith(figures.NO_BYTES_REASON)
    ]
    show.result({"figures": image_paths, "points": points, "without_bytes": no_bytes_kernels})
    for skip_reason in skip_reasons:
        show.note(f"not drawn: {skip_reason}")
    published_count = sum(point.published for point in points)
    measured_count = sum(point.seconds is not None for point in points) - published_count
    published_text = f", {published_count} published by others" if published_count else ""
    by = "of them with an imported time" if any("imported times" in plot.name for plot in plots) else "of them measured"
    show.line(f"{counted(len(points), 'point')}, {measured_count or 'none'} {by}{published_text}")
    for path in image_paths:
        show.line(f"  {path}")
