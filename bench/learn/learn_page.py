"""Writes the page of `rooflab learn`: 21 sections, their widgets and data, in one HTML file that needs no network."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rooflab.bench.base.plain import Row
from rooflab.bench.learn.drawing import figures
from rooflab.bench.learn.learn_data import DATA_FOLDER, FOLDER, glossary, load, packed
from rooflab.kernels._files import write_whole
from rooflab.roofline.numbers import digits, percent, si, whole

TITLE = "How a language model answers, down to the bytes"


def render(folder: Path = DATA_FOLDER, live: bool = False) -> str:
    """Returns the page as HTML, with the data in `folder`.  `live` lets the page ask the server that sends it.

    Raises `ValueError` if a data file is damaged."""
    data = load(folder)
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"digits": digits, "whole": whole, "percent": percent, "si": si, "slug": _slug}
    return environment.get_template("learn.html").render(
        title=TITLE,
        live=live,
        data=data,
        figures=figures(data),
        glossary=glossary(),
        sections=sorted(path.name for path in (FOLDER / "sections").glob("*.html")),
        style=Markup((FOLDER / "learn.css").read_text()),
        script=Markup(_script()),
        packed={name: packed(content) for name, content in data.items()},
    )


def _script() -> str:
    """Returns the shared scripts, then each widget in a block of its own, so that their names cannot collide."""
    shared = [(FOLDER / name).read_text() for name in ("shared.js", "learn.js")]
    blocks = [f"{{\n{path.read_text()}}}\n" for path in sorted((FOLDER / "widgets").glob("*.js"))]
    return "".join(["'use strict';\n", *shared, *blocks, "rooflab.start();\n"])


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def write_page(out: Path, folder: Path = DATA_FOLDER) -> Row:
    """Writes the page to `out` atomically.  Returns its path (`file`), its `bytes`, and the number of `sections`."""
    page = render(folder).encode()
    write_whole(out, page)
    return {"file": str(out), "bytes": len(page), "sections": page.count(b"<section ")}
