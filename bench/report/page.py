"""Writes a report as one HTML file with text, tables and figures.  The page needs no other file and no script."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rooflab.bench.base.plain import Row
from rooflab.bench.core import NOT_RUN
from rooflab.bench.report.content import Content, gather
from rooflab.bench.report.facts import slug
from rooflab.bench.report.figures import Drawing
from rooflab.bench.report.sources import load
from rooflab.bench.report.tables import BAD_COLUMNS
from rooflab.kernels._files import write_whole
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import counted, digits, in_unit, percent, plain_value, si, times, whole

_TEMPLATE_FOLDER = Path(__file__).parent


def render(content: Content) -> str:
    """Makes the HTML text of the report page."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filter_functions = (digits, whole, percent, times, counted, si, in_unit, plain_value, slug, breakable, svg)
    environment.filters |= {filter_function.__name__: filter_function for filter_function in filter_functions}
    machines = {machine["key"]: machine for machine in content.machines}
    return environment.get_template("page.html").render(
        content=content,
        rooflines={roofline_drawing.machine: roofline_drawing for roofline_drawing in content.rooflines},
        bad=BAD_COLUMNS,
        not_run=NOT_RUN,
        absent=sum(len(gap["names"]) for gap in content.unmeasured if gap["machine"] in machines),
        op_anchors={op["op"]: f"op-{op_index}-{slug(op['op'])}" for op_index, op in enumerate(content.ops, 1)},
        machines=machines,
    )


def _shown(value: Any) -> Any:
    """Replaces the control characters in a text, as HTML does not allow them. Returns other values unchanged."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value


def breakable(text: str) -> Markup:
    """Escapes `text` for HTML, and allows line breaks after commas and slashes.  Long case names need these breaks."""
    return Markup(re.sub(r"([,/])", r"\1<wbr>", str(escape(visible(text)))))


def svg(drawing: Drawing) -> str:
    """Returns the figure as a data URL with an SVG image."""
    return f"data:image/svg+xml;base64,{b64encode(drawing.files()['svg']).decode()}"


TITLE = "Rooflab report"


def write_report(paths: Sequence[Path], out: Path, title: str = TITLE) -> Row:
    """Reads the records in `paths` (files, or folders at any depth) and writes the HTML page to `out` atomically.
    Returns the path of the page (`file`), its `bytes`, the number of `figures`, and its `content`.

    Raises `ValueError` in three cases: a record is damaged, there is no record, or `out` is a folder.  For a damaged
    record, the message names the file and the line."""
    out = Path(out)
    content = gather(*load(paths), title)
    page = render(content).encode()
    write_whole(out, page)
    return {"file": str(out), "bytes": len(page), "figures": len(content.rooflines), "content": content}
