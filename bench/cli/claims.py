"""`study`: what is often said of LLM inference, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for


@app.command()
def study(
    names: Annotated[list[str] | None, typer.Argument(help="Such as kv-cache or paging; --all runs every one.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All studies, and a page of them.")] = False,
    model: Annotated[str, typer.Option(help="smollm2-135m, a GGUF file or a folder.")] = "smollm2-135m",
    dummy: option.Dummy = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The same in short, for CI; its verdicts say nothing.")
    ] = False,
    device: option.Device = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Claims about LLM inference (the cache saves O(n^2), batching gives 5 to 10 times): what is predicted, what this
    machine measures, and whether each holds."""
    from rooflab.bench.latency.studies import STUDIES

    if every == bool(names):
        raise ValueError(f"study: expected names of {', '.join(STUDIES)}, or --all")
    for name in names or ():
        if name not in STUDIES:
            raise ValueError(f"study: expected one of {', '.join(STUDIES)}, got {name!r}")
    from rooflab.bench.core import RunWriter, result_folder
    from rooflab.bench.latency.latency_records import study_record
    from rooflab.bench.latency.pages import run_study, write_page
    from rooflab.bench.latency.study import Lab

    lab, found = Lab(model, dummy, smoke, {"device": device}), []
    folder: Path = out or result_folder()
    writer = RunWriter(folder)
    for name in STUDIES if every else names or ():
        with show.waiting(f"study {name}"):
            found.append(run_study(name, lab))
        own = found[-1]
        show.line(own.claim, "bold")
        for columns, rows in own.tables():
            show.table(rows, columns)
        colours = {"holds": "green", "holds in part": "yellow", "fails": "red", "NOISY": "yellow"}
        show.line(f"{own.verdict}: {own.number}", colours.get(own.verdict))
        show.line()
        writer.write(study_record(found[-1], lab, writer.run_id))
        found[-1].draw(folder)
    page = write_page(found, lab, writer.path) if every else folder
    told = ("name", "claim", "verdict", "number", "rows")
    show.result([{name: getattr(own, name) for name in told} for own in found])
    show.note(f"figures: {page}; records: {writer.path}")
    exit_for({"NOISY" if own.verdict == "NOISY" else "OK" for own in found})
