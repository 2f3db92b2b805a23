"""Defines the command `learn`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.extras import need
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app


@app.command()
def learn(
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("learn.html"), json: option.Json = False
) -> None:
    """Write a page that explains how a language model answers, from tokens to bytes on a GPU.  It needs no network."""
    need("report")
    from rooflab.bench.learn.learn_page import write_page

    written = write_page(out)
    show.result(written)
    show.line(f"{written['file']}: {written['sections']} sections, {written['bytes'] / 1e6:.2f} MB")
