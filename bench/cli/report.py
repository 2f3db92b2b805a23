"""`report`: one HTML file from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import Json, app


@app.command()
def report(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Records: files, or folders at any depth; results/ without any.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "Rooflab report",
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="With figures and plotly's 5 MB of script.")] = True,
    json: Json = False,
) -> None:
    """One HTML file from records, which fetches nothing: ladders, rooflines, A/B verdicts, compiled code, engine.

    It judges nothing: a failure in the records is shown first and does not change the exit status.
    """
    from rooflab.bench.report import write_report

    with show.waiting("reading records"):
        written = write_report(paths or [Path("results")], out, title, plots)
    if json:
        show.as_json(written)
        return
    content = written.content
    kernels = sum(len(ladder.blocks) for op in content.ops for ladder in op.ladders)
    show.line(f"{written.file}: {written.bytes / 1e6:.1f} MB, {written.figures} interactive rooflines")
    show.line(f"  {content.records} records of {content.runs} runs in {len(content.files)} files; {kernels} cases")
    for standing in content.standings:
        ratio = standing.over_library
        if ratio:
            behind = f", behind in {standing.slower_cases}" if standing.slower_cases else ""
            name = f"{standing.op} {standing.scheme} on {standing.machine}"
            show.line(f"  {name}: {ratio.mean:.2f} times as fast as the library over {ratio.cases} cases{behind}")
    for problem in content.problems:
        where = f" {problem.where}" if problem.where else ""
        show.line(f"  {problem.name}{where}: {problem.status}: {problem.reason}", "red")
