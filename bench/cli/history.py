"""`history`: committed records over time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import Json, OutOption, app

COLUMNS = ("op", "kernel", "case", "scheme", "points", "trend", "latest_ms", "latest", "z", "last_step", "state")


@app.command()
def history(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Records: files, or folders with all below; results/ without any.")
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help="Only this op; repeatable.")] = None,
    kernel: Annotated[list[str] | None, typer.Option("--kernel", help="Only this kernel; repeatable.")] = None,
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case; repeatable.")] = None,
    machine: Annotated[list[str] | None, typer.Option("--machine", help="Part of a machine key; repeatable.")] = None,
    last: Annotated[int, typer.Option(help="Points of the same level that a new one is compared with.")] = 20,
    threshold: Annotated[float, typer.Option(help="A change below this share is none.")] = 0.02,
    repo: Annotated[Path | None, typer.Option(help="Checkout whose history orders commits; this one's.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write every point to this file.")] = None,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Trends of committed records: levels, steps, and whether the newest point is unusual; --out draws them."""
    from rooflab.bench.report.trends import report

    made = report.history(paths or [Path("results")], report.Chosen(op or (), kernel or (), case or (), machine or ()))
    trends = made.trends(repo, last, threshold)
    files = [str(path) for path in report.write(trends, csv, out)]
    if json:
        show.as_json(made.summary(trends) | {"written": files})
        return
    rows = [_shown(trend.row()) for trend in trends]
    for circumstances in dict.fromkeys(row["circumstances"] for row in rows):
        own = [row for row in rows if row["circumstances"] == circumstances]
        show.table(own, COLUMNS, circumstances)
        show.line()
    for text in report.notes(made, trends):
        show.line(text)
    for path in files:
        show.line(f"  {path}")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: changes in percent, and what all kernels of a machine share as one text."""
    step = row["last_step"]
    where = ", ".join(part for part in (row["machine"], row["setting"], row["timer"]) if part)
    return row | {"circumstances": where, "last_step": "" if step is None else f"{step:+.1%} at {row['step_at']}"}
