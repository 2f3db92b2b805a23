"""The roofline that answers: hover, an op's legend entry, menus for role, scheme and case; drawn by plotly alone.

Three filters must not undo each other, and plotly has no query language, so each uses attributes of its own: the legend
`visible`, the role menu `opacity` and `hoverinfo`, the menu of schemes and cases `mode`, error bars and `hoveron`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, get_args

import plotly.graph_objects as go

from rooflab.bench.report.axes import INK, layout, reference_roof
from rooflab.bench.report.places import Roofline
from rooflab.bench.report.traces import COLOURS, Drawn, arrow_traces, ceiling_traces, legend_traces, point_traces
from rooflab.roofline.points import Role

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "displayModeBar": True,
    "responsive": True,
    # Named one by one: left to itself plotly has a button that sends the figure's data to a server of its own.
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "showSendToCloud": False,
    "toImageButtonOptions": {"format": "svg", "filename": "roofline"},
}
Choice = tuple[str, Callable[[Drawn], bool]]
Setting = Callable[[Drawn, bool], dict[str, Any]]


def figure(roofline: Roofline) -> go.Figure:
    """The figure of one machine: FLOP/s over intensity, and bytes/s over bytes for kernels without FLOPs."""
    roof = reference_roof(roofline.ceilings)
    computing = [place for place in roofline.places if place.point.flops > 0]
    moving = [place for place in roofline.places if place.point.flops == 0]
    ops = list(dict.fromkeys(place.point.op for place in roofline.places))
    colours = {op: COLOURS[index % len(COLOURS)] for index, op in enumerate(ops)}
    drawn = ceiling_traces(roofline, computing, moving) + legend_traces(colours, computing)
    for places, axis in ((computing, ""), (moving, "2")):
        drawn += arrow_traces(places, roof, axis, colours) + point_traces(places, roof, axis, colours)
    menus: list[tuple[list[Choice], Setting, float]] = [
        (_role_choices(drawn), by_role, 0.0),
        (_case_choices(drawn), by_case, 132.0),
    ]
    for choices, setting, _ in menus:
        first = choices[0][1]
        for one in drawn:
            for name, value in setting(one, first(one)).items():
                one.trace[name] = value
    found = go.Figure([one.trace for one in drawn], layout(computing, moving, roofline.ceilings))
    found.update_layout(updatemenus=[_menu(drawn, *menu) for menu in menus])
    return found


def by_role(one: Drawn, on: bool) -> dict[str, Any]:
    """What the role menu sets of a trace that it shows or hides."""
    return {"opacity": 1.0 if on else 0.0, "hoverinfo": "text" if on and one.role != "arrow" else "skip"}


def by_case(one: Drawn, on: bool) -> dict[str, Any]:
    """What the menu of schemes and cases sets of a trace that it shows or hides."""
    drawn = "markers" if one.role != "arrow" else "lines+markers"
    mode = one.trace.mode if one.role is None else drawn if on else "none"
    bars = on and one.timed and one.role not in (None, "arrow")
    return {"mode": mode, "hoveron": "points" if on else "fills", "error_y.visible": bars}


def _menu(drawn: Sequence[Drawn], choices: Sequence[Choice], setting: Setting, left_px: float) -> dict[str, Any]:
    buttons = []
    for label, shows in choices:
        settings = [setting(one, shows(one)) for one in drawn]
        values = {name: [each[name] for each in settings] for name in settings[0]}
        buttons.append({"label": escape(label), "method": "restyle", "args": [values]})
    return {
        "type": "dropdown",
        "direction": "down",
        "buttons": buttons,
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"l": left_px, "b": 8},
        "showactive": True,
        "bgcolor": "rgba(128,136,146,0.12)",
        "bordercolor": INK,
        "font": {"size": 12, "color": INK},
    }


def _role_choices(drawn: Sequence[Drawn]) -> list[Choice]:
    there = {one.role for one in drawn}
    found: list[Choice] = [("all roles", lambda one: True)]
    found += [(role, _of_role(role)) for role in get_args(Role) if role in there]
    if not all(one.timed for one in drawn):
        found.append(("timed only", lambda one: one.role is None or one.timed))
        found.append(("bounds only", lambda one: one.role is None or not one.timed))
    return found


def _of_role(role: str) -> Callable[[Drawn], bool]:
    return lambda one: one.role in (None, role)


def _case_choices(drawn: Sequence[Drawn]) -> list[Choice]:
    schemes = list(dict.fromkeys(one.scheme for one in drawn if one.scheme))
    found = [("largest cases", _of_case(None, True)), ("all cases", _of_case(None, False))]
    for scheme in schemes if len(schemes) > 1 else []:
        found += [(f"{scheme}, largest", _of_case(scheme, True)), (f"{scheme}, all cases", _of_case(scheme, False))]
    return found


def _of_case(scheme: str | None, largest: bool) -> Callable[[Drawn], bool]:
    return lambda one: one.role is None or (scheme in (None, one.scheme) and (one.largest or not largest))
