"""Defines the commands `report`, `history` and `picture`, which turn records into an HTML page, trends and pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.extras import need
from rooflab.bench.base.plain import Json, Row
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.roofline.numbers import counted

Records = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Records: files, or folders at any depth; without any, .rooflab/, or results/ of Rooflab's checkout."
    ),
]


@app.command()
def report(
    paths: Records = None,
    out: Annotated[Path, option.file("--out", help="The file to write.")] = Path("report.html"),
    json: option.Json = False,
) -> None:
    """Write a self-contained HTML file from records: kernels compared, rooflines, A/B verdicts, compiled code, engine.

    Failures in the records are shown first, but they do not change the exit status."""
    need("report")
    from rooflab.bench.core import result_folder
    from rooflab.bench.report.page import write_report

    with show.waiting("reading records"):
        report_file = write_report(paths or [result_folder("kept")], out)
    show.result(report_file)
    report_page = report_file["content"]
    kernels = sum(len(kernel_table.blocks) for op in report_page.ops for kernel_table in op["ladders"])
    size_text = f"{report_file['bytes'] / 1e6:.1f} MB"
    show.line(f"{report_file['file']}: {size_text}, {counted(report_file['figures'], 'roofline')}")
    run_text, files_text = counted(report_page.runs, "run"), counted(len(report_page.files), "file")
    show.line(f"  {counted(report_page.records, 'record')} of {run_text} in {files_text}; {counted(kernels, 'case')}")
    for op_comparison in report_page.standings:
        ratio = op_comparison["over_library"]
        if ratio:
            slower = f", slower in {op_comparison['slower_cases']}" if op_comparison["slower_cases"] else ""
            name, cases = "{op} {scheme} on {machine}".format_map(op_comparison), counted(ratio["cases"], "case")
            show.line(f"  {name}: {ratio['mean']:.2f} times as fast as the library over {cases}{slower}")
    if report_page.noisy:
        show.line(f"  {counted(len(report_page.noisy), 'result')} NOISY: no ratio is made of these times", "yellow")
    for page_problem in report_page.problems:
        location = f" {page_problem['where']}" if page_problem["where"] else ""
        show.line("  {name}{}: {status}: {reason}".format(location, **page_problem), "red")


KERNEL_COLUMNS = ("op", "kernel", "cases", "points", "states", "worst_last_step")
COLUMNS = ("op", "kernel", "case", "scheme", "points", "trend", "latest_ms", "latest", "z", "last_step", "state")


@app.command()
def history(
    paths: Records = None,
    op: option.OnlyOp = None,
    kernel: option.OnlyKernel = None,
    case: option.OnlyCase = None,
    machine: option.OnlyMachine = None,
    last: Annotated[int, typer.Option(min=1, help="Points of the same level that a new one is compared with.")] = 20,
    threshold: Annotated[float, typer.Option(min=0.0, help="Smallest relative change that counts.")] = 0.02,
    json: option.Json = False,
) -> None:
    """Show trends of kernel times over commits: stable levels, sudden steps, and whether the newest time is unusual.

    The table has a row for each kernel.  With --kernel or --case it has a row for each input case of the kernels."""
    from rooflab.bench.core import result_folder
    from rooflab.bench.report.sources import grouped
    from rooflab.bench.report.trends.points import RecordFilter, commit_order, read_points, repository
    from rooflab.bench.report.trends.trend import find_trends, notes, summary

    trend_points = read_points(
        paths or [result_folder("kept")], RecordFilter(op or (), kernel or (), case or (), machine or ())
    )
    commit_sequence = commit_order((run_point.record.commit for run_point in trend_points["points"]), repository())
    time_trends = find_trends(trend_points["points"], commit_sequence, last, threshold)
    show.result(summary(trend_points, time_trends))
    rows = [_shown(time_trend.row()) for time_trend in time_trends]
    by_case = bool(kernel or case)
    for run_conditions, group in grouped(rows, lambda row: row["circumstances"]).items():
        show.table(group if by_case else _by_kernel(group), COLUMNS if by_case else KERNEL_COLUMNS, run_conditions)
        show.line()
    for note_text in notes(trend_points, time_trends):
        show.line(note_text)


def _by_kernel(rows: list[Row]) -> list[Row]:
    """Combines the table rows of a kernel's input cases into one row per kernel.  The new row counts the cases in each
    state, such as STEADY or SLOWER.  It names the case whose newest sudden change of time is the largest slowdown."""
    from rooflab.bench.report.sources import grouped

    kernel_rows = []
    for (op, kernel), kernel_cases in grouped(rows, lambda row: (row["op"], row["kernel"])).items():
        state_counts = Counter(row["state"] for row in kernel_cases)
        step_rows = [row for row in kernel_cases if row["last_step"]]
        worst_row = max(step_rows, key=lambda row: float(row["last_step"].partition("%")[0]), default=None)
        kernel_rows.append(
            {
                "op": op,
                "kernel": kernel,
                "cases": len(kernel_cases),
                "points": sum(row["points"] for row in kernel_cases),
                "states": ", ".join(f"{state_count} {row_state}" for row_state, state_count in state_counts.items()),
                "worst_last_step": f"{worst_row['last_step']}, {worst_row['case']}" if worst_row else "",
            }
        )
    return kernel_rows


def _shown(row: Row) -> dict[str, Json]:
    """Formats a trend row: joins machine, settings and timer; shows the last sudden change of the time in percent."""
    step = row["last_step"]
    setup_text = ", ".join(setup_field for setup_field in (row["machine"], row["setting"], row["timer"]) if setup_field)
    return row | {"circumstances": setup_text, "last_step": "" if step is None else f"{step:+.1%} at {row['step_at']}"}


pictures = typer.Typer(no_args_is_help=True, help="Draw what kernels move by level.")
app.add_typer(pictures, name="picture")


@pictures.command("bytes")
def bytes_(
    op: option.OpName,
    kernels: Annotated[
        list[str], typer.Option("--kernel", help="A kernel's name; repeatable, in the picture's order.")
    ],
    case: Annotated[str, typer.Option("--case", help="One case, as B=1,T=4096,...")],
    scheme: Annotated[str | None, typer.Option("--scheme", help="The dtypes; bf16 where the op has it.")] = None,
    seed: int = 0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Draw the bytes that kernels move at each memory level: HBM, L2 to the SMs, shared memory with its bank conflicts.

    Kernels with compiled code (sm_90a) run in the emulator.  For a naive kernel, the operands of its torch calls are
    counted.  Writes a PNG and the records with the numbers."""
    from rooflab.bench.core import RunWriter, result_folder
    from rooflab.bench.report.pictures.canvas import draw_levels
    from rooflab.bench.report.pictures.levels import move

    with show.waiting(f"{op} {case}"):
        records = move(op, kernels, case, scheme, seed)
    folder = out or result_folder()
    writer = RunWriter(folder, records[0].run_id)
    writer.write(*records)
    rows = [{"kernel": record.kernel, **record.metrics} for record in records]
    picture = draw_levels(records, folder)
    show.result({"figure": picture, "numbers": writer.path, "kernels": rows})
    megabyte_rows = [_megabytes(row) for row in rows]
    show.table(megabyte_rows, tuple(megabyte_rows[0]), "")
    show.line(f"{picture}, numbers in {writer.path}")


def _megabytes(row: Row) -> dict[str, Json]:
    """Returns a short row for the terminal: kernel, megabytes moved at each memory level, and number of launches."""
    megabytes: dict[str, Json] = {"kernel": row["kernel"]}
    for memory in ("hbm", "l2", "shared"):
        byte_counts = [row[name] for access in ("read", "write") if (name := f"moved_{memory}_{access}_bytes") in row]
        megabytes[f"{memory}_mb"] = sum(byte_counts) / 1e6 if byte_counts else None
    return megabytes | {"launches": int(row["launches"])}
