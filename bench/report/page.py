"""The content as one HTML file: text, tables, plotly's script once, and every figure; nothing is fetched."""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from rooflab.bench.report import words
from rooflab.bench.report.content import Content
from rooflab.bench.report.interactive import CONFIG, figure
from rooflab.bench.report.places import Roofline
from rooflab.roofline.plot import roofline_figure
from rooflab.roofline.points import Point, si

_TEMPLATES = Path(__file__).parent


@dataclass(frozen=True)
class Picture:
    """One machine's roofline, twice: for a screen with scripts, and for paper and a browser without them."""

    roofline: Roofline
    anchor: str
    interactive: Markup
    printed: str
    """A `data:` address of an SVG."""
    alt: str


def render(content: Content, plots: bool = True) -> str:
    """The page.  Without `plots` it has no figure and no script, and is smaller by plotly's 5 MB and the drawings."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "digits": words.digits,
        "whole": words.whole,
        "percent": words.percent,
        "times": words.times,
        "in_unit": words.in_unit,
        "si": si,
        "slug": words.slug,
        "unit_name": lambda unit: "µs" if unit == "us" else unit,
        "place": ratio_place,
        "breakable": breakable,
    }
    drawn = [_picture(one, number) for number, one in enumerate(content.rooflines, 1)] if plots else []
    return environment.get_template("page.html").render(
        content=content,
        pictures=drawn,
        plots=plots,
        plotly=Markup(get_plotlyjs()) if drawn else "",
        reach=ratio_reach(content),
        op_anchors=anchors([op.op for op in content.ops], "op"),
        machines={machine.key: machine for machine in content.machines},
    )


def anchors(names: Sequence[str], prefix: str) -> dict[str, str]:
    """An anchor for each name; a number tells those apart that differ only in what an anchor cannot hold."""
    seen: Counter[str] = Counter()
    found = {}
    for name in names:
        base = f"{prefix}-{words.slug(name)}"
        seen[base] += 1
        found[name] = base if seen[base] == 1 else f"{base}-{seen[base]}"
    return found


def breakable(text: str) -> Markup:
    """`text`, escaped, that may be broken after a comma or a slash: a case without blanks is a long word."""
    return Markup(re.sub(r"([,/])", r"\1<wbr>", str(escape(text))))


def ratio_reach(content: Content) -> float:
    """The ratio at the right end of the small axes: the largest or smallest of them all, within 1.5 and 8."""
    spans = [one.over_library for one in content.standings if one.over_library]
    return min(8.0, max(1.5, *(max(one.high, 1 / one.low) for one in spans), 1.5))


def ratio_place(ratio: float, reach: float, half_px: float = 58.0) -> float:
    """Where a ratio lies on a small logarithmic axis, in pixels: 1 in the middle, `reach` at the right end."""
    return 2.0 + half_px * (1 + max(-1.0, min(1.0, log(ratio) / log(reach))))


def _picture(roofline: Roofline, number: int) -> Picture:
    anchor = f"roofline-{number}"
    # Its own id and no random one: the same records give the same file.
    drawn = to_html(figure(roofline), CONFIG, include_plotlyjs=False, full_html=False, div_id=f"{anchor}-figure")
    points = [place.point for place in roofline.places if place.largest]
    timed = sum(place.point.seconds is not None for place in roofline.places)
    ops = ", ".join(dict.fromkeys(place.point.op for place in roofline.places))
    alt = (
        f"Roofline of {roofline.name}: {len(roofline.places)} kernels and cases of {ops}, {timed} of them timed. "
        "The tables below hold the same numbers."
    )
    return Picture(roofline, anchor, Markup(drawn), _svg(roofline, points), alt)


def _svg(roofline: Roofline, points: Sequence[Point]) -> str:
    drawn = roofline_figure(points, roofline.ceilings, f"{roofline.name}: largest case of each op")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rooflab"}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}"
