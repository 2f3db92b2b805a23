"""The two panels of the interactive roofline: what they span, their ticks, and where each point lies on them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from typing import Any

from rooflab.bench.report.places import Place
from rooflab.roofline.model import Ceilings
from rooflab.roofline.points import plotted_flops_per_s, roof_flops_per_s, si

Range = tuple[float, float]
INK = "#7b828b"
_GRID = "rgba(128,136,146,0.22)"
_PLANE_PX, _STRIP_PX, _BETWEEN_PX, _TOP_PX, _FOOT_PX = 460, 180, 70, 64, 50


def reference_roof(ceilings: Sequence[Ceilings]) -> Ceilings:
    """The roof that an untimed point stands on: the measured one where there is one, as in the printed figure."""
    return next((one for one in ceilings if one.kind == "measured"), ceilings[0])


def place_xy(place: Place, roof: Ceilings) -> tuple[float, float]:
    """Intensity and FLOP/s; bytes of a call and bytes/s for a kernel without FLOPs.  On the roof where not timed."""
    point = place.point
    if point.flops > 0:
        return point.intensity, plotted_flops_per_s(point, roof)
    return point.traffic_bytes, point.traffic_bytes / (point.seconds or point.bound_s)


def plane_range(places: Sequence[Place], ceilings: Sequence[Ceilings]) -> tuple[Range, Range]:
    """Intensities and FLOP/s that the first panel spans: every point and every roof of its dtypes, with room."""
    spots = [place_xy(place, reference_roof(ceilings)) for place in places]
    dtypes = {place.point.dtype for place in places}
    peaks = [(roof_flops_per_s(one, dtype), one.hbm_bytes_per_s) for one in ceilings for dtype in dtypes]
    ridge = max(peak / bandwidth for peak, bandwidth in peaks)
    xs, ys = [x for x, _ in spots], [y for _, y in spots]
    return (min(xs) / 2.5, max(*xs, ridge) * 8), (min(ys) / 2.5, max(*ys, *(peak for peak, _ in peaks)) * 3)


def strip_range(places: Sequence[Place], ceilings: Sequence[Ceilings]) -> tuple[Range, Range]:
    """Bytes and bytes/s that the second panel spans."""
    spots = [place_xy(place, reference_roof(ceilings)) for place in places]
    xs, ys = [x for x, _ in spots], [y for _, y in spots]
    return (min(xs) / 3, max(xs) * 3), (min(ys) / 3, max(*ys, *(one.hbm_bytes_per_s for one in ceilings)) * 4)


def layout(computing: Sequence[Place], moving: Sequence[Place], ceilings: Sequence[Ceilings]) -> dict[str, Any]:
    """Axes, height and legend.  The page gives background and text their colours, by the reader's light or dark."""
    panels_px = (_PLANE_PX if computing else 0) + (_STRIP_PX if moving else 0)
    panels_px += _BETWEEN_PX if computing and moving else 0
    found: dict[str, Any] = {
        "height": panels_px + _TOP_PX + _FOOT_PX,
        "margin": {"l": 56, "r": 10, "t": _TOP_PX, "b": _FOOT_PX},
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left",
            "bgcolor": "#ffffff",
            "bordercolor": "#5b626b",
            "font": {"color": "#15181c", "size": 11, "family": "system-ui, sans-serif"},
        },
        "dragmode": False,  # a finger on the figure scrolls the page; the tools over it zoom
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.08, "yanchor": "top", "font": {"size": 12}},
        "modebar": {"orientation": "h", "bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": "#1f83c4"},
    }
    split = _STRIP_PX / panels_px if moving else 0.0
    if computing:
        low = (_STRIP_PX + _BETWEEN_PX) / panels_px if moving else 0.0
        (x, y) = plane_range(computing, ceilings)
        found["xaxis"] = {**_axis(x, "FLOP per byte of traffic"), "anchor": "y"}
        found["yaxis"] = {**_axis(y, "FLOP/s", "FLOP/s"), "anchor": "x", "domain": [low, 1]}
    if moving:
        (x, y) = strip_range(moving, ceilings)
        found["xaxis2"] = {**_axis(x, "no FLOPs: bytes moved in a call", "B"), "anchor": "y2"}
        found["yaxis2"] = {**_axis(y, "bytes/s", "B/s"), "anchor": "x2", "domain": [0, split]}
    return found


def _axis(span: Range, title: str, unit: str = "") -> dict[str, Any]:
    low, high = log10(span[0]), log10(span[1])
    decades = range(ceil(low), floor(high) + 1)
    step = 1 if len(decades) <= 8 else 2
    ticks = [10.0**power for power in decades if power % step == 0]
    return {
        "type": "log",
        "range": [low, high],
        "title": {"text": title, "standoff": 6, "font": {"size": 12}},
        "tickvals": ticks,
        "ticktext": [f"{si(tick)}{unit.removesuffix('FLOP/s')}".strip() if unit else f"{tick:,g}" for tick in ticks],
        "minor": {"ticks": "inside", "ticklen": 2, "tickcolor": INK, "dtick": "D1"},
        "gridcolor": _GRID,
        "linecolor": INK,
        "tickcolor": INK,
        "ticks": "outside",
        "ticklen": 4,
        "zeroline": False,
        "showline": True,
    }
