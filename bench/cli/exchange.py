"""`import` and `export`: results of other tools as records, and records in the forms that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import Json, OnlyCase, OnlyKernel, OnlyMachine, OnlyOp, OutOption, app

DEFINED = ("definition", "op_type", "op", "scheme", "traces", "reason")


@app.command("import")
def import_results(
    tool: Annotated[str, typer.Argument(help="pytest-benchmark, tritonbench or flashinfer.")],
    paths: Annotated[list[Path], typer.Argument(help="Its files; for flashinfer the folder of a data set.")],
    op: Annotated[
        list[str] | None, typer.Option("--op", help="tritonbench: the operator of a CSV. flashinfer: only this op.")
    ] = None,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Read another tool's results; --out keeps them as records.  Lists what cannot become a record."""
    from rooflab.bench.exchange import commands

    found = commands.read(tool, paths, op)
    files = commands.keep(found.imported, out)
    if json:
        show.as_json(found.summary() | {"written": [str(path) for path in files]})
        return
    if found.definitions:
        show.table(found.definitions, DEFINED)
    if found.imported.records:
        show.bench_table(found.rows())
    for skipped in found.imported.skipped:
        show.line(f"not imported: {skipped.place}: {skipped.reason}", "dim")
    show.line(f"{len(found.imported.records)} results, {len(found.imported.skipped)} that are none")
    for path in files:
        show.line(f"  {path}")
    if found.imported.records and not files:
        show.note("nothing was written: --out FOLDER keeps them as records")


@app.command("export")
def export_records(
    form: Annotated[str, typer.Argument(help="pytest-benchmark, which dashboards such as Bencher read too, or csv.")],
    records: Annotated[list[Path], typer.Argument(help="Records: files or folders.")],
    to: Annotated[Path, typer.Option("--to", help="The file to write.")],
    op: OnlyOp = None,
    kernel: OnlyKernel = None,
    case: OnlyCase = None,
    machine: OnlyMachine = None,
    json: Json = False,
) -> None:
    """Write records in the form of another tool.  Lists the records that the form has no place for."""
    from rooflab.bench.exchange import commands
    from rooflab.bench.report.trends.points import Chosen

    written, skipped = commands.export(form, records, to, Chosen(op or (), kernel or (), case or (), machine or ()))
    if json:
        show.as_json({"file": str(to), "records": written, "left_out": [vars(each) for each in skipped]})
        return
    for text, count in commands.counted(skipped):
        show.line(f"not exported: {count} {text}", "dim")
    show.line(f"{written} records: {to}")
