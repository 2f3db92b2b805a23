"""Defines the commands `import` and `export`, which convert between other tools' results and Rooflab's records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.roofline.numbers import counted

DEFINITION_COLUMNS = ("definition", "op_type", "op", "scheme", "traces", "reason")


@app.command("import")
def import_results(
    tool: Annotated[str, typer.Argument(help="pytest-benchmark, tritonbench, flashinfer, csv or published.")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Its files; flashinfer: the folder of a data set; published: a wheel or folder of "
            "aiconfigurator-core, Liger-Kernel's CSV, or a .toml that describes a table."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="csv: FIELD=COLUMN, latency=COLUMN:UNIT, or FIELD==TEXT for all rows; fields: op, kernel, latency, "
            "flops, bytes, scheme, gpu, case.NAME.",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="published: keep every table, not only those of results/published.")
    ] = False,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Read another tool's results.  With --out, store them as records.  Lists the results that cannot become records.

    The tool `published` turns published kernel times into tables, in the format of the folder results/published."""
    from rooflab.bench.exchange import convert
    from rooflab.bench.exchange.files import write_records

    if tool == "published":
        _import_published(paths or [], out, whole)
        return
    results = convert.read(tool, paths or [], column or ())
    written_files = write_records(results.records, out) if out is not None else []
    summary = convert.summary(results)
    show.result(summary | {"written": written_files})
    if results.definitions:
        show.table(results.definitions, DEFINITION_COLUMNS)
    if results.records:
        show.bench_table(summary["rows"])
    for skipped_result in results.skipped:
        show.line(f"not imported: {skipped_result.place}: {skipped_result.reason}", "dim")
    skipped_count = len(results.skipped)
    show.line(f"{counted(len(results.records), 'result')}{f', {skipped_count} not imported' if skipped_count else ''}")
    for path in written_files:
        show.line(f"  {path}")
    if results.records and not written_files:
        show.note("nothing was written: --out FOLDER keeps them as records")


PUBLISHED_COLUMNS = ("gpu", "op", "scheme", "library", "kernel", "rows", "below_bound")


def _import_published(paths: list[Path], out: Path | None, whole: bool) -> None:
    from rooflab.bench.exchange.published import read_published, selected, write_published

    with show.waiting("reading published times"):
        all_tables = read_published(paths)
    tables = all_tables.placed if whole else selected(all_tables)
    index_path = write_published(tables, out) if out else None
    show.result(
        all_tables.summary() | {"kept": [matched_table.table.file for matched_table in tables], "written": index_path}
    )
    show.table([matched_table.row() for matched_table in all_tables.placed], PUBLISHED_COLUMNS)
    for matched_table in all_tables.placed:
        for rows_text in matched_table.below:
            show.line(f"left out: {matched_table.table.file}: {rows_text}: faster than its GPU can be", "yellow")
    for source_name, unused_count in all_tables.left.most_common():
        show.line(f"no place here: {counted(unused_count, 'row')} of {source_name}", "dim")
    row_count = sum(matched_table.table.rows for matched_table in all_tables.placed)
    show.line(f"{counted(all_tables.read, 'row')}: {row_count:,} placed in {counted(len(all_tables.placed), 'table')}")
    if index_path:
        show.line(f"  {counted(len(tables), 'table')}: {index_path}")
    else:
        show.note("nothing was written: --out FOLDER keeps the tables that results/published has, with --whole all")


@app.command("export")
def export_records(
    form: Annotated[str, typer.Argument(help="pytest-benchmark, which dashboards such as Bencher read too.")],
    records: Annotated[list[Path], typer.Argument(help="Records: files or folders.")],
    to: Annotated[Path, option.file("--to", help="The file to write.")],
    op: option.OnlyOp = None,
    kernel: option.OnlyKernel = None,
    case: option.OnlyCase = None,
    machine: option.OnlyMachine = None,
    json: option.Json = False,
) -> None:
    """Write records in the format of another tool.  Lists the records that this format cannot represent."""
    from rooflab.bench.exchange import convert
    from rooflab.bench.report.trends.points import RecordFilter

    record_count, rejects = convert.export(
        form, records, to, RecordFilter(op or (), kernel or (), case or (), machine or ())
    )
    show.result({"file": to, "records": record_count, "left_out": [vars(skipped_record) for skipped_record in rejects]})
    for skip_reason, reason_count in Counter(skipped_record.reason for skipped_record in rejects).most_common():
        show.line(f"not exported: {reason_count} {skip_reason}", "dim")
    show.line(f"{counted(record_count, 'record')}: {to}")
