"""The interactive roofline of the page, drawn by plotly alone: FLOP/s over intensity, and bytes/s over bytes.

Kernels without FLOPs stand in the second panel.  The legend hides an op, as in any figure of plotly's, and the menu
chooses schemes and cases; a choice there shows every op again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10, sqrt
from textwrap import wrap
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rooflab.bench.report.rooflines import Place, Roofline
from rooflab.bench.report.words import digits, percent, times
from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.points import Role, arrows, plotted_flops_per_s, roof_flops_per_s, si

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "responsive": True,
    # Named one by one: left to itself plotly has a button that sends the figure's data to a server of its own.
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "showSendToCloud": False,
    "toImageButtonOptions": {"format": "svg", "filename": "roofline"},
}
COLOURS = "#1f83c4 #d1601f #1a9564 #c4569c #a7694f #8f7a12 #8d6fd1 #d6494c #148f96 #b0607a #6f9420 #b5771a".split()
"""Each reads on a white and on a dark page: at least 3 to 1 against both, which a test holds."""
SYMBOLS: Mapping[Role, str] = {"naive": "triangle-down", "library": "square", "optimized": "circle", "peer": "diamond"}
DASHES: Mapping[CeilingKind, str] = {"measured": "solid", "datasheet": "dash", "at_clock": "dot"}
INK, _GRID, _CLEAR = "#7b828b", "rgba(128,136,146,0.22)", "rgba(0,0,0,0)"
_PLANE_PX, _STRIP_PX, _BETWEEN_PX, _TOP_PX, _FOOT_PX = 460, 180, 70, 64, 50
_LINE = 42
"""Characters of a line that a phone has room for."""
Range = tuple[float, float]


class Drawn(NamedTuple):
    """One trace, and what the menu asks of it."""

    trace: go.Scatter
    scheme: str | None = None
    """None for what is no kernel's and always shown."""
    largest: bool = True


def figure(roofline: Roofline) -> go.Figure:
    """The figure of one machine."""
    computing = [place for place in roofline.places if place.point.flops > 0]
    moving = [place for place in roofline.places if place.point.flops == 0]
    ops = list(dict.fromkeys(place.point.op for place in roofline.places))
    colours = {op: COLOURS[index % len(COLOURS)] for index, op in enumerate(ops)}
    roof = _reference_roof(roofline.ceilings)
    drawn = _ceiling_traces(roofline, computing, moving) + _legend_traces(colours, computing)
    for places, axis in ((computing, ""), (moving, "2")):
        drawn += _arrow_traces(places, roof, axis, colours) + _point_traces(places, roof, axis, colours)
    menu = _menu(drawn)
    for one, visible in zip(drawn, menu["buttons"][0]["args"][0]["visible"], strict=True):
        one.trace.visible = visible
    found = go.Figure([one.trace for one in drawn], _layout(computing, moving, roofline.ceilings))
    return found.update_layout(updatemenus=[menu])


def _menu(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Largest cases or all, of every scheme or of one; the first entry is what the figure opens with."""
    schemes = list(dict.fromkeys(one.scheme for one in drawn if one.scheme is not None))
    entries: list[tuple[str, Callable[[Drawn], bool]]] = []
    for scheme in (None, *(schemes if len(schemes) > 1 else ())):
        for largest in (True, False):
            cases = ("largest" if scheme else "largest cases") if largest else "all cases"
            entries.append((f"{scheme}, {cases}" if scheme else cases, _shows(scheme, largest)))
    return {
        "buttons": [
            {"label": escape(label), "method": "restyle", "args": [{"visible": [shows(one) for one in drawn]}]}
            for label, shows in entries
        ],
        **{"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}},
        **{"bgcolor": "rgba(128,136,146,0.12)", "bordercolor": INK, "font": {"size": 12, "color": INK}},
    }


def _shows(scheme: str | None, largest: bool) -> Callable[[Drawn], bool]:
    return lambda one: one.scheme is None or (scheme in (None, one.scheme) and (one.largest or not largest))


def _reference_roof(ceilings: Sequence[Ceilings]) -> Ceilings:
    """The roof that an untimed point stands on: the measured one where there is one, as in the printed figure."""
    return next((one for one in ceilings if one.kind == "measured"), ceilings[0])


def _spot(place: Place, roof: Ceilings) -> tuple[float, float]:
    """Intensity and FLOP/s; bytes of a call and bytes/s for a kernel without FLOPs.  On the roof where not timed."""
    point = place.point
    if point.flops > 0:
        return point.intensity, plotted_flops_per_s(point, roof)
    return point.traffic_bytes, point.traffic_bytes / (point.seconds or point.bound_s)


def _ranges(places: Sequence[Place], ceilings: Sequence[Ceilings]) -> tuple[Range, Range]:
    """What a panel spans in x and y: every point and every roof of its dtypes, with room."""
    spots = [_spot(place, _reference_roof(ceilings)) for place in places]
    xs, ys = [x for x, _ in spots], [y for _, y in spots]
    if not places[0].point.flops:
        return (min(xs) / 3, max(xs) * 3), (min(ys) / 3, max(*ys, *(one.hbm_bytes_per_s for one in ceilings)) * 4)
    dtypes = {place.point.dtype for place in places}
    peaks = [(roof_flops_per_s(one, dtype), one.hbm_bytes_per_s) for one in ceilings for dtype in dtypes]
    ridge = max(peak / bandwidth for peak, bandwidth in peaks)
    return (min(xs) / 2.5, max(*xs, ridge) * 8), (min(ys) / 2.5, max(*ys, *(peak for peak, _ in peaks)) * 3)


def _layout(computing: Sequence[Place], moving: Sequence[Place], ceilings: Sequence[Ceilings]) -> dict[str, Any]:
    """Axes, height and legend.  The page gives background and text their colours, by the reader's light or dark."""
    panels_px = _PLANE_PX * bool(computing) + _STRIP_PX * bool(moving) + _BETWEEN_PX * bool(computing and moving)
    found: dict[str, Any] = {
        "height": panels_px + _TOP_PX + _FOOT_PX,
        "margin": {"l": 56, "r": 10, "t": _TOP_PX, "b": _FOOT_PX},
        "autosize": True,
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"color": "#15181c", "size": 11}},
        "dragmode": False,  # a finger on the figure scrolls the page; the tools over it zoom
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.08, "yanchor": "top"},
        "modebar": {"orientation": "h", "bgcolor": _CLEAR, "color": INK, "activecolor": COLOURS[0]},
    }
    if computing:
        low = (_STRIP_PX + _BETWEEN_PX) / panels_px if moving else 0.0
        x, y = _ranges(computing, ceilings)
        found["xaxis"] = {**_axis(x, "FLOP per byte of traffic"), "anchor": "y"}
        found["yaxis"] = {**_axis(y, "FLOP/s", ""), "anchor": "x", "domain": [low, 1]}
    if moving:
        x, y = _ranges(moving, ceilings)
        found["xaxis2"] = {**_axis(x, "no FLOPs: bytes moved in a call", "B"), "anchor": "y2"}
        found["yaxis2"] = {**_axis(y, "bytes/s", "B/s"), "anchor": "x2", "domain": [0, _STRIP_PX / panels_px]}
    return found


def _axis(span: Range, title: str, unit: str | None = None) -> dict[str, Any]:
    """A logarithmic axis with a tick at each power of ten, by its SI prefix where it has a unit."""
    low, high = log10(span[0]), log10(span[1])
    ticks = [10.0**power for power in range(ceil(low), floor(high) + 1, 1 if high - low <= 8 else 2)]
    return {
        "type": "log",
        "range": [low, high],
        "title": {"text": title, "standoff": 6, "font": {"size": 12}},
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" if unit is None else f"{si(tick)}{unit}".strip() for tick in ticks],
        "gridcolor": _GRID,
        "linecolor": INK,
        "ticks": "outside",
        "zeroline": False,
    }


def _point_traces(places: Sequence[Place], roof: Ceilings, axis: str, colours: Mapping[str, str]) -> list[Drawn]:
    """One trace for each op, role, scheme, and largest case or not."""
    groups: dict[tuple[str, Role, str, bool, bool], list[Place]] = {}
    for place in places:
        point = place.point
        key = (point.op, point.role, place.scheme, place.largest, point.seconds is not None)
        groups.setdefault(key, []).append(place)
    found = []
    for (op, role, scheme, largest, timed), group in groups.items():
        spots = [_spot(place, roof) for place in group]
        trace = go.Scatter(
            x=[x for x, _ in spots],
            y=[y for _, y in spots],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="markers",
            marker=_marker(group, role, timed, colours[op]),
            error_y=_error_bars(group, spots, colours[op]) if timed else None,
            hovertext=[_hover_text(place) for place in group],
            hoverinfo="text",
            legendgroup=escape(op),
            showlegend=False,
            name=escape(f"{op} {role} {scheme}"),
            meta="kernels",
        )
        found.append(Drawn(trace, scheme, largest))
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


def _hover_text(place: Place) -> str:
    """Kernel, case, time, ratios, bound, rates, traffic, check, and the record's file and line, in short lines."""
    row, point = place.row, place.point
    lines = [f"{row.role}, {row.backend}", place.case_id.replace(",", ", "), place.scheme]
    if row.latency_ms is None:
        lines += [f"not timed: {row.status}", f"at best {digits(1e6 * point.bound_s, 4)} µs ({row.limiter})"]
    else:
        spread = "" if row.p20_ms is None or row.p80_ms is None else f" (p20 {_us(row.p20_ms)}, p80 {_us(row.p80_ms)})"
        lines.append(f"{_us(row.latency_ms)} µs{spread}")
        ratios = [(row.over_library, "library"), (row.over_naive, "naive")]
        lines.append(" · ".join(f"{times(ratio.value)} {name} (as fast)" for ratio, name in ratios if ratio))
        if row.bound_fraction is not None:
            lines.append(f"{percent(row.bound_fraction)} of the bound, by {row.limiter}")
        rates = ((row.flops_per_s, "FLOP/s"), (row.bytes_per_s, "B/s"))
        lines.append(" · ".join(f"{si(rate)}{unit}" for rate, unit in rates if rate))
    intensity = f", {digits(point.intensity)} FLOP/byte" if point.flops else ""
    lines += [f"{si(point.traffic_bytes)}B {row.traffic}{intensity}", f"checked by {row.checked_by}"]
    lines += [f"{label} {value}" for label, value in row.facts if label in ("timer", "config", "commit")]
    lines.append(f"record {row.source.run_id}, line {row.source.line}")
    head = f"<b>{escape(f'{point.op} / {point.label}')}</b>"
    return "<br>".join([head, *(escape(line) for text in lines for line in wrap(text, _LINE))])


def _us(ms: float) -> str:
    return digits(1e3 * ms, 4)


def _arrow_traces(places: Sequence[Place], roof: Ceilings, axis: str, colours: Mapping[str, str]) -> list[Drawn]:
    """From each case's naive kernel to its best optimized one, as in the printed figure."""
    by_point = {id(place.point): place for place in places}
    found = []
    for naive, end in arrows([place.point for place in places]):
        tail, tip = by_point[id(naive)], by_point[id(end)]
        (x0, y0), (x1, y1) = _spot(tail, roof), _spot(tip, roof)
        if (x0, y0) == (x1, y1):
            continue
        timed = naive.seconds is not None and end.seconds is not None
        colour = colours[end.op] if timed else INK
        head = {"symbol": "arrow", "angleref": "previous", "standoff": 5, "size": [0, 9], "color": colour}
        trace = go.Scatter(
            x=[x0, x1],
            y=[y0, y1],
            xaxis=f"x{axis}",
            yaxis=f"y{axis}",
            mode="lines+markers",
            line={"width": 1.2, "color": colour, "dash": "solid" if timed else "dot"},
            marker=head,
            hoverinfo="skip",
            legendgroup=escape(end.op),
            showlegend=False,
            name=escape(f"{end.op} naive to {end.label}"),
            meta="arrow",
        )
        found.append(Drawn(trace, tail.scheme, tail.largest))
    return found


def _legend_traces(ops: Mapping[str, str], computing: Sequence[Place]) -> list[Drawn]:
    """What stands in the legend for each op: no point, so that no choice of the menu takes the entry away."""
    found = []
    for op, colour in ops.items():
        axis = "" if any(place.point.op == op for place in computing) else "2"
        marker = {"size": 10, "color": colour, "symbol": "circle"}
        name = escape(op)
        spot = {"x": [None], "y": [None], "xaxis": f"x{axis}", "yaxis": f"y{axis}"}
        trace = go.Scatter(**spot, mode="markers", marker=marker, legendgroup=name, name=name, meta="legend")
        found.append(Drawn(trace))
    return found


def _ceiling_traces(roofline: Roofline, computing: Sequence[Place], moving: Sequence[Place]) -> list[Drawn]:
    """Flat roofs of the dtypes that are there and bandwidth diagonals, of every kind.

    Those that a bound stands on are named, to the left of the ridge: above the diagonal no kernel can be.
    """
    reference = _reference_roof(roofline.ceilings).kind
    found = []
    for ceiling in roofline.ceilings:
        lines = _plane_lines(ceiling, roofline, computing) if computing else []
        if moving:
            ends, bandwidth = _ranges(moving, roofline.ceilings)[0], ceiling.hbm_bytes_per_s
            lines.append(_line("2", ends, (bandwidth, bandwidth), ceiling, f"{si(bandwidth)}B/s", 0, "top right"))
        for number, line in enumerate(lines):
            line.showlegend = number == 0
            if ceiling.kind != reference:
                line.mode, line.text = "lines", None
            found.append(Drawn(line))
    return found


def _plane_lines(ceiling: Ceilings, roofline: Roofline, computing: Sequence[Place]) -> list[go.Scatter]:
    bandwidth = ceiling.hbm_bytes_per_s
    left, right = _ranges(computing, roofline.ceilings)[0]
    dtypes = dict.fromkeys(place.point.dtype for place in computing)
    heights = {dtype: roof_flops_per_s(ceiling, dtype) for dtype in dtypes}
    ridge = max(heights.values()) / bandwidth
    along = (left, sqrt(left * ridge), ridge)
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
