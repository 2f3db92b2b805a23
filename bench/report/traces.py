"""What the interactive roofline draws: points with error bars, arrows, ceilings, and each op's entry in the legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import sqrt
from typing import Any

import plotly.graph_objects as go

from rooflab.bench.report.axes import INK, place_xy, plane_range, reference_roof, strip_range
from rooflab.bench.report.hover import hover_text
from rooflab.bench.report.places import Place, Roofline
from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.points import Role, arrows, roof_flops_per_s, si

COLOURS = "#1f83c4 #d1601f #1a9564 #c4569c #a7694f #8f7a12 #8d6fd1 #d6494c #148f96 #b0607a #6f9420 #b5771a".split()
"""Each reads on a white and on a dark page: at least 3 to 1 against both, which a test holds."""
SYMBOLS: Mapping[Role, str] = {"naive": "triangle-down", "library": "square", "optimized": "circle", "peer": "diamond"}
DASHES: Mapping[CeilingKind, str] = {"measured": "solid", "datasheet": "dash", "at_clock": "dot"}


@dataclass(frozen=True)
class Drawn:
    """One trace, and what the filters ask of it."""

    trace: go.Scatter
    role: str | None
    """`arrow` for one; None for what is no kernel's and always shown."""
    timed: bool = True
    scheme: str = ""
    largest: bool = True


def point_traces(places: Sequence[Place], roof: Ceilings, axis: str, colours: Mapping[str, str]) -> list[Drawn]:
    """One trace for each op, role, scheme, and largest case or not, so that each can be shown alone."""
    groups: dict[tuple[str, Role, str, bool, bool], list[Place]] = {}
    for place in places:
        point = place.point
        key = (point.op, point.role, place.scheme, place.largest, point.seconds is not None)
        groups.setdefault(key, []).append(place)
    found = []
    for (op, role, scheme, largest, timed), group in groups.items():
        spots = [place_xy(place, roof) for place in group]
        trace = go.Scatter(
            x=[x for x, _ in spots],
            y=[y for _, y in spots],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="markers",
            marker=_marker(group, role, timed, colours[op]),
            error_y=_error_bars(group, spots, colours[op]) if timed else None,
            hovertext=[hover_text(place) for place in group],
            hoverinfo="text",
            legendgroup=escape(op),
            showlegend=False,
            name=escape(f"{op} {role} {scheme}"),
            meta="kernels",
        )
        found.append(Drawn(trace, role, timed, scheme, largest))
    return found


def _marker(group: Sequence[Place], role: Role, timed: bool, colour: str) -> dict[str, Any]:
    """Hollow where the traffic is modelled, filled where it is counted; a grey cross where only a bound is known."""
    if not timed:
        return {"size": 7, "color": INK, "symbol": "x-thin", "line": {"width": 1.8, "color": INK}}
    forms = ["" if place.point.traffic_basis == "counted" else "-open" for place in group]
    symbols = [f"{SYMBOLS[role]}{form}" for form in forms]
    return {"size": 9, "color": colour, "symbol": symbols, "line": {"width": 1.7, "color": colour}}


def _error_bars(group: Sequence[Place], spots: Sequence[tuple[float, float]], colour: str) -> dict[str, Any]:
    """From p80, the slow end and so the lower one, to p20."""
    above, below = [], []
    for place, (_, y) in zip(group, spots, strict=True):
        median, p20, p80 = place.row.latency_ms, place.row.p20_ms, place.row.p80_ms
        above.append(max(0.0, y * median / p20 - y) if median and p20 and p20 > 0 else 0.0)
        below.append(max(0.0, y - y * median / p80) if median and p80 and p80 > 0 else 0.0)
    ends = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {**ends, "color": colour, "thickness": 1.2, "width": 3}


def arrow_traces(places: Sequence[Place], roof: Ceilings, axis: str, colours: Mapping[str, str]) -> list[Drawn]:
    """From each case's naive kernel to its best optimized one, as in the printed figure."""
    by_point = {id(place.point): place for place in places}
    found = []
    for naive, end in arrows([place.point for place in places]):
        tail, tip = by_point[id(naive)], by_point[id(end)]
        (x0, y0), (x1, y1) = place_xy(tail, roof), place_xy(tip, roof)
        if (x0, y0) == (x1, y1):
            continue
        timed = naive.seconds is not None and end.seconds is not None
        colour = colours[end.op] if timed else INK
        trace = go.Scatter(
            x=[x0, x1],
            y=[y0, y1],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="lines+markers",
            line={"width": 1.2, "color": colour, "dash": "solid" if timed else "dot"},
            marker=_arrow_head(colour),
            hoverinfo="skip",
            legendgroup=escape(end.op),
            showlegend=False,
            name=escape(f"{end.op} naive to {end.label}"),
            meta="arrow",
        )
        found.append(Drawn(trace, "arrow", timed, tail.scheme, tail.largest))
    return found


def _arrow_head(colour: str) -> dict[str, Any]:
    head = {"symbol": "arrow", "angleref": "previous", "standoff": 5}
    return {**head, "size": [0, 9], "color": colour, "line": {"width": 0}}


def legend_traces(ops: Mapping[str, str], computing: Sequence[Place]) -> list[Drawn]:
    """What stands in the legend for each op: no point, so that no filter takes the entry away."""
    found = []
    for op, colour in ops.items():
        axis = "" if any(place.point.op == op for place in computing) else "2"
        trace = go.Scatter(
            x=[None],
            y=[None],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="markers",
            marker={"size": 10, "color": colour, "symbol": "circle"},
            legendgroup=escape(op),
            name=escape(op),
            meta="legend",
        )
        found.append(Drawn(trace, None))
    return found


def ceiling_traces(roofline: Roofline, computing: Sequence[Place], moving: Sequence[Place]) -> list[Drawn]:
    """Flat roofs of the dtypes that are there and bandwidth diagonals, of every kind.

    Those that a bound stands on are named, to the left of the ridge: above the diagonal no kernel can be.
    """
    reference = reference_roof(roofline.ceilings).kind
    found = []
    for ceiling in roofline.ceilings:
        named = ceiling.kind == reference
        lines = _plane_lines(ceiling, roofline, computing) if computing else []
        if moving:
            ends = strip_range(moving, roofline.ceilings)[0]
            bandwidth = ceiling.hbm_bytes_per_s
            lines.append(_line("2", ends, (bandwidth, bandwidth), ceiling, f"{si(bandwidth)}B/s", 0, "top right"))
        for number, line in enumerate(lines):
            line.showlegend = number == 0
            if not named:
                line.mode, line.text = "lines", None
            found.append(Drawn(line, None))
    return found


def _plane_lines(ceiling: Ceilings, roofline: Roofline, computing: Sequence[Place]) -> list[go.Scatter]:
    bandwidth = ceiling.hbm_bytes_per_s
    left, right = plane_range(computing, roofline.ceilings)[0]
    dtypes = dict.fromkeys(place.point.dtype for place in computing)
    heights = {dtype: roof_flops_per_s(ceiling, dtype) for dtype in dtypes}
    ridge = max(heights.values()) / bandwidth
    middle = sqrt(left * ridge)
    along = (left, middle, ridge)
    lines = [_line("", along, [at * bandwidth for at in along], ceiling, f"{si(bandwidth)}B/s", 1)]
    for height in sorted(set(heights.values())):
        names = "/".join(dtype or "fp32 vector" for dtype, own in heights.items() if own == height)
        x, text = (height / bandwidth, right), f"{names} {si(height)}FLOP/s"
        lines.append(_line("", x, (height, height), ceiling, text, 0))
    return lines


def _line(
    axis: str, x: Sequence[float], y: Sequence[float], ceiling: Ceilings, text: str, at: int, place: str = "middle left"
) -> go.Scatter:
    """One ceiling, its name standing at its point number `at`."""
    kind = ceiling.kind.replace("_", " ")
    names = [""] * len(x)
    names[at] = f"{escape(text)}\u2002"
    return go.Scatter(
        x=list(x),
        y=list(y),
        xaxis=f"x{axis}",
        yaxis=f"y{axis}",
        mode="lines+text",
        text=names,
        textposition=place,
        textfont={"size": 10.5, "color": INK},
        line={"width": 1.4, "color": INK, "dash": DASHES[ceiling.kind]},
        hovertext=[f"{escape(text)}<br>{kind}"] * len(x),
        hoverinfo="text",
        legendgroup=f"ceiling {ceiling.kind}",
        legendrank=2000,
        name=f"ceiling, {kind}",
        meta="ceiling",
    )
