"""The interactive roofline of the page, drawn by plotly alone: FLOP/s over intensity, and bytes/s over bytes.

The second panel holds kernels without FLOPs.  The legend hides an op, as in any plotly figure.  The menu chooses
schemes and cases; each choice shows all ops again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape as escape_html
from itertools import pairwise
from math import inf, log10, sqrt
from textwrap import wrap
from typing import Any, NamedTuple

import plotly.graph_objects as go

from rooflab.bench.report.rooflines import COLOURS, PlacedPoint, Roofline
from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import digits, percent, si, times
from rooflab.roofline.points import KINDS, Role, arrows, roof_flops_per_s

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "responsive": True,
    # An explicit list: by default plotly has a button that sends the figure's data to its own server.
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "showSendToCloud": False,
    "toImageButtonOptions": {"format": "svg", "filename": "roofline"},
}
SYMBOLS: Mapping[Role, str] = {
    "naive": "triangle-down",
    "library": "square",
    "optimized": "circle",
    "peer": "diamond",
    "benchmark": "triangle-up",
}
DASHES: Mapping[CeilingKind, str] = {"measured": "solid", "datasheet": "dash", "at_clock": "dot"}
INK, _GRID, _CLEAR = "#7b828b", "rgba(128,136,146,0.22)", "rgba(0,0,0,0)"
CLOSE = 2.5
"""Roofs within this factor have one name of several lines: a line of text is 0.4 of a decade high."""
_LINE = 42
"""Characters per line that fit on a phone."""


class Drawn(NamedTuple):
    """One trace, and the properties by which the menu selects it."""

    trace: go.Scatter
    scheme: str | None = None
    """None for a trace that belongs to no kernel and is always shown."""
    main: bool = True


class RooflinePanel(NamedTuple):
    """The kernels with FLOPs, or those without FLOPs, and their axes."""

    places: Sequence[PlacedPoint]
    axes: Mapping[str, str]
    colours: Mapping[str, str]

    def spot(self, place: PlacedPoint) -> tuple[float, float]:
        """Intensity and FLOP/s; bytes of a call and bytes/s without FLOPs."""
        point = place.point
        assert point.seconds, "only timed kernels have a place"
        if point.flops > 0:
            return point.intensity, point.flops / point.seconds
        return point.traffic_bytes, point.traffic_bytes / point.seconds


def escape(text: str) -> str:
    """`text` as plotly shows it, in which no character is markup."""
    return escape_html(visible(text, keep="\n"))


def figure(roofline: Roofline) -> go.Figure:
    """The figure of one machine."""
    ops = list(dict.fromkeys(place.point.op for place in roofline.places))
    colours = {op: COLOURS[index % len(COLOURS)] for index, op in enumerate(ops)}
    halves = (
        ([place for place in roofline.places if place.point.flops > 0], {"xaxis": "x", "yaxis": "y"}),
        ([place for place in roofline.places if not place.point.flops], {"xaxis": "x2", "yaxis": "y2"}),
    )
    panels = [RooflinePanel(places, axes, colours) for places, axes in halves if places]
    drawn = [Drawn(line) for panel in panels for line in _ceilings(panel, roofline.ceilings, panel is panels[0])]
    drawn += [Drawn(_legend(op, panels)) for op in ops]
    for panel in panels:
        drawn += _arrows(panel) + _points(panel)
    menu = _menu(drawn)
    for one, shown in zip(drawn, menu["buttons"][0]["args"][0]["visible"], strict=True):
        one.trace.visible = shown
    return go.Figure(
        [one.trace for one in drawn], {**_layout(_spans([one.trace for one in drawn])), "updatemenus": [menu]}
    )


def _spans(traces: Sequence[go.Scatter]) -> dict[str, tuple[float, float]]:
    """The least and the greatest value on each axis."""
    found = dict[str, list[float]]()
    for trace in traces:
        for axis, values in ((trace.xaxis, trace.x), (trace.yaxis, trace.y)):
            found.setdefault(axis, []).extend(value for value in values if value is not None)
    return {axis: (min(values), max(values)) for axis, values in found.items()}


def _menu(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """The main points or all points, of every scheme or of one; the figure opens with the first entry."""
    schemes = list(dict.fromkeys(one.scheme for one in drawn if one.scheme is not None))
    entries: list[tuple[str, Callable[[Drawn], bool]]] = []
    for scheme in (None, *(schemes if len(schemes) > 1 else ())):
        prefix = f"{scheme}, " if scheme else ""
        entries += [(f"{prefix}main points", _shows(scheme, True)), (f"{prefix}all points", _shows(scheme, False))]
    return {
        "buttons": [
            {"label": escape(label), "method": "restyle", "args": [{"visible": [shows(one) for one in drawn]}]}
            for label, shows in entries
        ],
        **{"x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "pad": {"b": 8}},
        **{"bgcolor": "rgba(128,136,146,0.12)", "bordercolor": INK},
    }


def _shows(scheme: str | None, main: bool) -> Callable[[Drawn], bool]:
    return lambda one: one.scheme is None or (scheme in (None, one.scheme) and (one.main or not main))


def _layout(spans: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Axes, height and legend; an axis of rates has at least a decade, and so three ticks.

    The page sets the colours of background and text, by its light or dark mode.
    """
    both = "x" in spans and "x2" in spans
    found: dict[str, Any] = {
        "height": (520 if "x" in spans else 300) + 140 * both,
        "margin": {"l": 56, "r": 10, "t": 48, "b": 50},
        "autosize": True,
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "font": {"color": "#15181c", "size": 11}},
        "dragmode": False,  # a finger on the figure scrolls the page; the tools over it zoom
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.15, "yanchor": "top"},
        "modebar": {"orientation": "h", "bgcolor": _CLEAR, "color": INK, "activecolor": COLOURS[0]},
    }
    if "x" in spans:
        found["xaxis"] = _axis("y", "FLOP per byte that the kernel moves", None, spans["x"])
        slowest, fastest = spans["y"]
        found["yaxis"] = _axis("x", "FLOP/s", "", spans["y"], domain=[0.42 if both else 0, 1])
        found["yaxis"]["range"] = [log10(min(slowest / 1.5, fastest / 12)), log10(1.5 * fastest)]
    if "x2" in spans:
        slowest, bandwidth = spans["y2"]
        found["xaxis2"] = _axis("y2", "no FLOPs: bytes moved in a call", "B", spans["x2"])
        found["yaxis2"] = _axis("x2", "bytes/s", "B/s", spans["y2"], domain=[0, 0.22 if both else 1])
        found["yaxis2"]["range"] = [log10(min(slowest / 1.2, bandwidth / 12)), log10(1.2 * bandwidth)]
    return found


def _axis(anchor: str, title: str, unit: str | None, span: tuple[float, float], **more: Any) -> dict[str, Any]:
    """A logarithmic axis with SI prefixes if it has a unit; below two decades not only powers of ten have a tick."""
    steps = (1, 2, 5) if span[1] < 100 * span[0] else (1,)
    ticks = [step * 10.0**power for power in range(-6, 19) for step in steps]
    short = [f"{tick:,g}" if 0.01 <= tick < 1e6 else f"10<sup>{log10(tick):.0f}</sup>" for tick in ticks]
    return {
        "type": "log",
        "anchor": anchor,
        "title": {"text": title, "standoff": 6, "font": {"size": 12}},
        "tickvals": ticks,
        "ticktext": short if unit is None else [f"{si(tick)}{unit}" for tick in ticks],
        "tickangle": 0,
        "gridcolor": _GRID,
        "linecolor": INK,
        "ticks": "outside",
        "zeroline": False,
        **more,
    }


def _points(panel: RooflinePanel) -> list[Drawn]:
    """One trace for each combination of op, role, scheme, and main or other points."""
    groups: dict[tuple[str, Role, str, bool], list[PlacedPoint]] = {}
    for place in panel.places:
        point = place.point
        key = (point.op, point.role, place.row.record.scheme or "", place.main)
        groups.setdefault(key, []).append(place)
    found = []
    for (op, role, scheme, main), group in groups.items():
        spots, colour = [panel.spot(place) for place in group], panel.colours[op]
        trace = go.Scatter(
            x=[x for x, _ in spots],
            y=[y for _, y in spots],
            **panel.axes,
            mode="markers",
            marker=_marker(group, role, colour),
            error_y=_error_bars(group, spots, colour),
            hovertext=[_hover_text(place) for place in group],
            hoverinfo="text",
            legendgroup=escape(op),
            showlegend=False,
            name=escape(f"{op} {role} {scheme}"),
            meta="kernels",
        )
        found.append(Drawn(trace, scheme, main))
    return found


def _marker(group: Sequence[PlacedPoint], role: Role, colour: str) -> dict[str, Any]:
    """Hollow if the traffic is modelled, filled if it is counted."""
    forms = ["" if place.point.traffic_basis == "counted" else "-open" for place in group]
    symbols = [f"{SYMBOLS[role]}{form}" for form in forms]
    return {"size": 9, "color": colour, "symbol": symbols, "line": {"width": 1.7, "color": colour}}


def _error_bars(group: Sequence[PlacedPoint], spots: Sequence[tuple[float, float]], colour: str) -> dict[str, Any]:
    """From p80, the slow and therefore lower end, to p20."""
    ends: dict[str, list[float]] = {"array": [], "arrayminus": []}
    for place, (_, y) in zip(group, spots, strict=True):
        record, median = place.row.record, place.row.latency_ms or 0.0
        for name, slow in (("array", record.latency_p20_ms), ("arrayminus", record.latency_p80_ms)):
            ends[name].append(abs(y * median / slow - y) if slow else 0.0)
    return {"type": "data", "symmetric": False, **ends, "color": colour, "thickness": 1.2, "width": 3}


def _hover_text(place: PlacedPoint) -> str:
    """Kernel, case, time, ratios, bound, rates, traffic, check, and the record's file and line, in short lines."""
    row, point, record = place.row, place.point, place.row.record
    lines = [f"{point.role}, {record.backend}" if record.backend else point.role]
    lines += [text.replace(",", ", ") for text in (record.case_id, record.scheme) if text]
    ends = [f"{name} {_us(ms)}" for name, ms in (("p20", record.latency_p20_ms), ("p80", record.latency_p80_ms)) if ms]
    lines.append(f"{_us(row.latency_ms or 0.0)} µs ({', '.join(ends)})")
    ratios = [(row.over_library, "library"), (row.over_naive, "naive")]
    lines.append(" · ".join(f"{times(ratio.value)} {name} (as fast)" for ratio, name in ratios if ratio))
    if record.bound_fraction is not None:
        lines.append(f"{percent(record.bound_fraction)} of the bound, by {record.limiter}")
    rates = ((record.flops_per_s, "FLOP/s"), (record.bytes_per_s, "B/s"))
    lines.append(" · ".join(f"{si(rate)}{unit}" for rate, unit in rates if rate))
    intensity = f", {digits(point.intensity)} FLOP/byte" if point.flops else ""
    lines += [f"{si(point.traffic_bytes)}B {row.traffic}{intensity}", f"checked by {record.checked_by}"]
    lines += [f"{label} {value}" for label, value in row.facts if label in ("timer", "config", "commit")]
    lines.append(f"record {row.source.run_id}, line {row.source.line}")
    head = f"<b>{escape(f'{point.op} / {point.label}')}</b>"
    return "<br>".join([head, *(escape(line) for text in lines for line in wrap(text, _LINE))])


def _us(ms: float) -> str:
    return digits(1e3 * ms, 4)


def _arrows(panel: RooflinePanel) -> list[Drawn]:
    """Arrows from each case's naive kernel to its best optimized kernel, as in a figure file."""
    by_point = {id(place.point): place for place in panel.places}
    found = []
    for naive, end in arrows([place.point for place in panel.places]):
        tail, tip = by_point[id(naive)], by_point[id(end)]
        (x0, y0), (x1, y1) = panel.spot(tail), panel.spot(tip)
        if (x0, y0) == (x1, y1):
            continue
        colour = panel.colours[end.op]
        trace = go.Scatter(
            x=[x0, x1],
            y=[y0, y1],
            **panel.axes,
            mode="lines+markers",
            line={"width": 1.2, "color": colour},
            marker={"symbol": "arrow", "angleref": "previous", "standoff": 5, "size": [0, 9], "color": colour},
            hoverinfo="skip",
            legendgroup=escape(end.op),
            showlegend=False,
            name=escape(f"{end.op} naive to {end.label}"),
            meta="arrow",
        )
        found.append(Drawn(trace, tail.row.record.scheme or "", tail.main and tip.main))
    return found


def _legend(op: str, panels: Sequence[RooflinePanel]) -> go.Scatter:
    """The legend's entry for an op: it has no point, so that no choice of the menu removes it."""
    panel = next(one for one in panels if any(place.point.op == op for place in one.places))
    marker = {"size": 10, "color": panel.colours[op], "symbol": "circle"}
    name = {"legendgroup": escape(op), "name": escape(op), "meta": "legend"}
    return go.Scatter(x=[None], y=[None], **panel.axes, mode="markers", marker=marker, **name)


def _ceilings(panel: RooflinePanel, ceilings: Sequence[Ceilings], in_legend: bool) -> list[go.Scatter]:
    """One line with gaps for each kind: the bandwidth diagonal, and a flat roof for each rate of the panel's dtypes.

    Ceilings that a bound uses have a name, to the left of the ridge: no kernel can lie above the diagonal.
    """
    dtypes = dict.fromkeys(place.point.dtype for place in panel.places)
    computing = panel.places[0].point.flops > 0
    xs = [panel.spot(place)[0] for place in panel.places]
    ridges = (
        [roof_flops_per_s(one, dtype) / one.hbm_bytes_per_s for one in ceilings for dtype in dtypes]
        if computing
        else []
    )
    left, right = min(xs) / 3, max(*xs, *ridges) * 3 if ridges else max(xs) * 3
    left = min([left, *(ridge / 10 for ridge in ridges)])  # a roof's name has room on a phone
    named = next((one.kind for one in ceilings if one.kind == "measured"), ceilings[0].kind)
    found = []
    for ceiling in ceilings:
        bandwidth = ceiling.hbm_bytes_per_s
        name = f"{si(bandwidth)}B/s"
        spots: list[tuple[float | None, float | None, str]] = [(left, bandwidth, name), (right, bandwidth, "")]
        if computing:
            heights = {dtype: roof_flops_per_s(ceiling, dtype) for dtype in dtypes}
            ridge = max(heights.values()) / bandwidth
            spots = [(x, x * bandwidth, text) for x, text in ((left, ""), (sqrt(left * ridge), name), (ridge, ""))]
            lines: list[str] = []
            for height, above in pairwise([*sorted(set(heights.values())), inf]):
                names = "/".join(dtype or "fp32 vector" for dtype, own in heights.items() if own == height)
                lines.insert(0, f"{names} {si(height)}FLOP/s")
                text = "" if above < CLOSE * height else "\n".join(lines)
                lines = lines if above < CLOSE * height else []
                spots += [(None, None, ""), (height / bandwidth, height, text), (right, height, "")]
        x, y, texts = zip(*spots, strict=True)
        kind = KINDS[ceiling.kind]
        found.append(
            go.Scatter(
                x=x,
                y=y,
                **panel.axes,
                mode="lines+text" if ceiling.kind == named else "lines",
                text=[f"{escape(text)}\u2002".replace("\n", "\u2002<br>") for text in texts],
                textposition="middle left" if computing else "top right",
                textfont={"size": 10.5, "color": INK},
                cliponaxis=False,
                line={"width": 1.4, "color": INK, "dash": DASHES[ceiling.kind]},
                hovertext=[f"{escape(text)}<br>{kind}".replace("\n", "<br>") for text in texts],
                hoverinfo="text",
                legendgroup=f"ceiling {ceiling.kind}",
                legendrank=2000,
                showlegend=in_legend,
                name=f"ceiling, {kind}",
                meta="ceiling",
            )
        )
    return found
