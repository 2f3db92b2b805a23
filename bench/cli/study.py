"""`study`: what is often said of LLM inference, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.cli.app import DeviceOption, Json, OutOption, app


@app.command()
def study(
    names: Annotated[list[str] | None, typer.Argument(help="Such as kv-cache; --all for each of them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All studies, and a page of them.")] = False,
    model: Annotated[str, typer.Option(help="smollm2-135m, a GGUF file or a folder.")] = "smollm2-135m",
    dummy: Annotated[bool, typer.Option("--dummy", help="Random weights.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The same in short, for CI; its verdicts say nothing.")
    ] = False,
    device: DeviceOption = None,
    out: OutOption = None,
    json: Json = False,
) -> None:
    """Claims about LLM inference (the cache saves O(n^2), batching gives 5 to 10 times): what is predicted, what this
    machine measures, and whether each holds."""
    from rooflab.bench.latency.studies import STUDIES

    if every == bool(names):
        raise ValueError(f"study: expected names of {', '.join(STUDIES)}, or --all")
    for name in names or ():
        if name not in STUDIES:
            raise ValueError(f"study: expected one of {', '.join(STUDIES)}, got {name!r}")
    from rooflab.bench.latency.pages import run_study, write_page
    from rooflab.bench.latency.records import study_record
    from rooflab.bench.latency.study import Lab
    from rooflab.bench.records.files import RunWriter, result_folder

    lab, found = Lab(model, dummy, smoke, {"device": device}), []
    folder: Path = out or result_folder()
    writer = RunWriter(folder)
    for name in STUDIES if every else names or ():
        with show.waiting(f"study {name}"):
            found.append(run_study(name, lab))
        if not json:
            own = found[-1]
            show.line(own.claim, "bold")
            groups = dict.fromkeys(tuple(row) for row in own.rows)
            for columns in groups:
                show.table([row for row in own.rows if tuple(row) == columns], columns)
            colours = {"holds": "green", "holds in part": "yellow", "fails": "red"}
            show.line(f"{own.verdict}: {own.number}", colours.get(own.verdict))
            show.line()
        writer.write(study_record(found[-1], lab, writer.run_id))
        found[-1].draw(folder)
    page = write_page(found, lab, writer.path) if every else folder
    if json:
        show.as_json([
            {"name": own.name, "claim": own.claim, "verdict": own.verdict, "number": own.number, "rows": own.rows}
            for own in found
        ])  # fmt: skip
    else:
        show.note(f"figures: {page}; records: {writer.path}")
