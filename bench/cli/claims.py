"""Defines the command `study`, which tests common claims about LLM inference by prediction and by measurement."""

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
    smoke: Annotated[bool, typer.Option("--smoke", help="A short run for CI; its verdicts say nothing.")] = False,
    device: option.Device = None,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Test claims about LLM inference, such as "the KV cache saves O(n^2)" or "batching gives 5 to 10 times".  Shows
    the prediction, the measurement on this machine, and whether the claim holds."""
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

    study_config, studies = Lab(model, dummy, smoke, {"device": device}), []
    out_folder: Path = out or result_folder()
    writer = RunWriter(out_folder)
    for name in STUDIES if every else names or ():
        with show.waiting(f"study {name}"):
            study_result = run_study(name, study_config)
        studies.append(study_result)
        show.line(study_result.claim, "bold")
        show.table(study_result.rows, tuple(study_result.rows[0]))
        verdict_colours = {"holds": "green", "holds in part": "yellow", "fails": "red", "NOISY": "yellow"}
        show.line(f"{study_result.verdict}: {study_result.number}\n", verdict_colours[study_result.verdict])
        writer.write(study_record(study_result, study_config, writer.run_id))
        study_result.draw(out_folder)
    page_path = write_page(studies, study_config, writer.path) if every else out_folder
    columns = ("name", "claim", "verdict", "number", "rows")
    show.result([{name: getattr(study, name) for name in columns} for study in studies])
    show.note(f"figures: {page_path}; records: {writer.path}")
    exit_for({"NOISY" if study.verdict == "NOISY" else "OK" for study in studies})
