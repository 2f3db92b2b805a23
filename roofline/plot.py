"""Draws roofline figures: FLOP/s against intensity, and the used fraction of the bandwidth for kernels without FLOPs.

The first panel is the log-log roofline of Williams, Waterman and Patterson (CACM 2009). Intensity is FLOPs per byte of
a kernel's *traffic*. Points have numbers, and a list beside the panel names the kernels. A second panel shows kernels
without FLOPs (`embedding`, `kv_cache_write`). A grey cross is a kernel without a measured time; it lies on its roof. A
star is a time that others published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import atan2, ceil, cos, degrees, floor, hypot, log10, sin
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerPatch
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch
from matplotlib.patheffects import withStroke
from matplotlib.style import context
from matplotlib.ticker import LogLocator

from rooflab.roofline.model import CeilingKind, Ceilings
from rooflab.roofline.numbers import si
from rooflab.roofline.plot_list import (
    CASE_CHARACTERS,
    COLOURS,
    COLUMN_POSITIONS,
    GREY,
    INK,
    ROW_IN,
    WIDTH_INCHES,
    Numbered,
    Roofs,
    draw_list,
    write_text,
)
from rooflab.roofline.points import (
    KIND_NAMES,
    NEAR_RADIUS,
    Box,
    Point,
    Role,
    arrows,
    numbered,
    overlap,
    place_labels,
    plotted_flops_per_s,
    roof_flops_per_s,
    that_matter,
)

_MARKERS: Mapping[Role, str] = {"naive": "v", "library": "s", "optimized": "o", "peer": "D", "benchmark": "^"}
_DASHES: Mapping[CeilingKind, Any] = {"datasheet": (0, (6, 3)), "measured": "solid", "at_clock": (0, (2, 2))}
_DPI, _BAR_INCHES = 150, 0.2
_ALPHA = 0.4
"""The opacity of a NOISY point."""
_TEXT_HALO = [withStroke(linewidth=2.0, foreground="white")]
_MARGIN, _PANEL_WIDTH = 0.055, 0.575
_MAX_NAME_WIDTH = 0.44
"""The largest width of a roof's name, as a fraction of the plane: the lowest roof's corner is farther to the right."""
with_own_settings = context(["default", {"svg.hashsalt": "rooflab"}])
"""A decorator for drawing functions: it suspends the user's settings of matplotlib (`text.usetex`, a dark page)."""
_without_math_text = context({"text.parse_math": False})  # a `$` in a name is a `$`


@with_own_settings
@_without_math_text
def roofline_figure(
    points: Sequence[Point], ceilings: Sequence[Ceilings], title: str | None = None, fixed_axes: bool = False
) -> Figure:
    """Draws the most important `points` (`points.that_matter`) under the roofs of `ceilings`.

    Points without a time lie on the roof. With `fixed_axes`, all figures of a device have the same axis limits, unless
    a point lies outside. Raises `ValueError` if there are no points or no ceilings, or if a dtype has no rate. If the
    ceilings belong to several devices, each point must name one of them."""
    if not points:
        raise ValueError("points: expected at least one, got none")
    names = {ceiling.device for ceiling in ceilings}
    if len(names) != 1 and not (names and all(point.device in names for point in points)):
        raise ValueError(f"ceilings: expected one device's, got {[ceiling.device for ceiling in ceilings]}")
    rows = numbered(that_matter(points))
    ceilings = [ceiling for ceiling in ceilings if any(point.device in (None, ceiling.device) for _, point in rows)]
    roofs = Roofs(ceilings)
    ops = list(dict.fromkeys(point.op for _, point in rows))
    colours = {op: COLOURS[op_index % len(COLOURS)] for op_index, op in enumerate(ops)}
    flop_points = [(point_number, point) for point_number, point in rows if point.flops > 0]
    no_flop_points = [(point_number, point) for point_number, point in rows if point.flops == 0]

    bars_inches = _BAR_INCHES * (len(no_flop_points) + 1) if no_flop_points else 0.0
    case_keys = {point.work for _, point in rows}
    list_height = ROW_IN * (
        len(rows) + sum(1.15 if len(case) <= CASE_CHARACTERS else 2.05 for _, case, _ in case_keys) + 2
    )
    fig_height = max((7.2 if flop_points else 0.0) + bars_inches + 1.1, list_height + 0.6)
    figure = Figure(figsize=(WIDTH_INCHES, fig_height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    heading_style: dict[str, Any] = {"fontsize": 13, "weight": "bold", "va": "center"}
    write_text(
        figure,
        _MARGIN,
        1 - 0.28 / fig_height,
        title or f"{ceilings[0].device} roofline",
        1 - 2 * _MARGIN,
        **heading_style,
    )
    bottom_inches = 0.55
    bars_inches = bars_inches if flop_points else fig_height - 1.1
    if flop_points:
        axes_y = bottom_inches + (bars_inches + 0.75 if no_flop_points else 0.0)
        axes = figure.add_axes((_MARGIN, axes_y / fig_height, _PANEL_WIDTH, (fig_height - 0.5 - axes_y) / fig_height))
        _draw_plane(axes, flop_points, roofs, colours, fixed_axes)
    if no_flop_points:
        bars_axes = figure.add_axes((_MARGIN, bottom_inches / fig_height, _PANEL_WIDTH, bars_inches / fig_height))
        _draw_movement(bars_axes, no_flop_points, roofs, colours)
    draw_list(figure, rows, roofs, colours)
    if len(rows) < len(points):
        points_note = f"{len(rows)} of {len(points)} points are drawn, of each op the fastest kernel first"
        figure.text(COLUMN_POSITIONS[1], 0.2 / fig_height, points_note, size=6.5, color=INK)
    return figure


@with_own_settings
def roofline_files(
    points: Sequence[Point], ceilings: Sequence[Ceilings], title: str | None = None, fixed_axes: bool = False
) -> dict[str, bytes]:
    """Returns the bytes of an SVG and of a PNG file, by suffix. Raises `ValueError` as `roofline_figure` does."""
    figure = roofline_figure(points, ceilings, title, fixed_axes)
    svg_file, png_file = BytesIO(), BytesIO()
    # A fixed salt and no date: the same points give the same file, so a committed figure changes only with its points.
    figure.savefig(svg_file, format="svg", metadata={"Date": None})
    figure.savefig(png_file, format="png")
    return {"svg": svg_file.getvalue(), "png": png_file.getvalue()}


def _frame(
    places: Sequence[tuple[float, float]], ceilings: Sequence[Ceilings], peaks: Sequence[float], fixed: bool
) -> Box:
    """Returns the limits of the plot's axes: left, bottom, right and top."""
    (min_x, min_y), (max_x, max_y) = (tuple(map(min_or_max, zip(*places, strict=True))) for min_or_max in (min, max))
    if fixed:
        peaks = [rate for roof in ceilings for rate in (*roof.tensor_flops_per_s.values(), roof.vector_flops_per_s)]
    ridge = max(peaks) / min(ceiling.hbm_bytes_per_s for ceiling in ceilings)
    has_many_devices = len({ceiling.device for ceiling in ceilings}) > 1
    corner_x = min(peaks) / max(ceiling.hbm_bytes_per_s for ceiling in ceilings)
    right, top = max(max_x, ridge) * 4, max(*peaks, max_y) * (60 if has_many_devices else 4)  # room for their legend
    if fixed:
        right, top = (10.0 ** ceil(log10(limit)) for limit in (max(max_x, ridge * 30), max(max_y, max(peaks) * 2)))
    name_x = 10 ** ((log10(corner_x) - _MAX_NAME_WIDTH * log10(right)) / (1 - _MAX_NAME_WIDTH))
    if not fixed:
        return min(min_x / 2.5, ridge / 12.5, name_x), min(min_y, *peaks) / 2.5, right, top
    left, bottom = (10.0 ** floor(log10(axis_min)) for axis_min in (min(min_x, name_x), min(min_y, min(peaks) / 100)))
    return left, bottom, right, top


def _draw_plane(axes: Axes, points: Numbered, roofs: Roofs, colours: Mapping[str, str], fixed_axes: bool) -> None:
    roof_keys = dict.fromkeys((roofs.of(point).device, point.dtype) for _, point in points)
    dtypes = {device: [dtype for roof_device, dtype in roof_keys if roof_device == device] for device in roofs.colours}
    peak_rates = [roof_flops_per_s(ceiling, dtype) for ceiling in roofs.ceilings for dtype in dtypes[ceiling.device]]
    point_positions = [(point.intensity, plotted_flops_per_s(point, roofs.of(point))) for _, point in points]
    left, bottom, right, top = _frame(point_positions, roofs.ceilings, peak_rates, fixed_axes)
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    axes.set_xlabel("FLOP per byte that the kernel moves")
    axes.set_ylabel("FLOP/s")
    axes.yaxis.set_major_formatter(lambda value, _: si(value))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.tick_params(which="minor", labelleft=False, labelbottom=False)  # labels within a decade overflow the margin
    for axis, axis_min, axis_max in ((axes.xaxis, left, right), (axes.yaxis, bottom, top)):
        if axis_max < axis_min * 100:  # with its decades alone, such an axis had one label or two
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.grid(which="major", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    roof_texts, slanted_boxes = _draw_roofs(axes, roofs, dtypes, point_positions)
    for naive_point, arrow_target in arrows([point for _, point in points]):
        arrow_tail, tip_xy = (
            (point.intensity, plotted_flops_per_s(point, roofs.of(point))) for point in (naive_point, arrow_target)
        )
        arrow_settings = {"shrinkA": 4, "shrinkB": 4, **_arrow(naive_point, arrow_target, colours[arrow_target.op])}
        axes.annotate("", xy=tip_xy, xytext=arrow_tail, arrowprops=arrow_settings, zorder=3)
    for (_, point), (x, y) in zip(points, point_positions, strict=True):
        _draw_marker(axes, point, x, y, colours[point.op])
    handler_map = {FancyArrowPatch: HandlerPatch(_legend_arrow)}
    legend_handles = _legend_handles(points, roofs)
    axes.figure.canvas.draw()  # fixes the sizes of the texts, because neither the legend nor a number may cover them
    name_boxes = [*map(_box, roof_texts), *slanted_boxes]
    marker_boxes = [(x - 4, y - 4, x + 4, y + 4) for x, y in axes.transData.transform(point_positions) * 72 / _DPI]
    legends: list[tuple[int, Any]] = []
    for corner in ("upper left", "lower right", "upper right", "lower left"):
        legend = axes.legend(handles=legend_handles, loc=corner, fontsize=7.5, framealpha=1.0, handler_map=handler_map)
        legends.append((sum(overlap(_box(legend), other_box) for other_box in (*name_boxes, *marker_boxes)), legend))
        if not legends[-1][0]:
            break
    axes.legend_ = min(legends, key=lambda legend: legend[0])[1]
    _draw_numbers(axes, points, point_positions, [*name_boxes, _box(axes.legend_)], colours)


def _arrow(naive: Point, end: Point, colour: str) -> dict[str, Any]:
    has_times = naive.seconds is not None and end.seconds is not None
    arrow_style: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 1.1, "alpha": 0.75}
    return arrow_style | {"color": colour if has_times else GREY, "linestyle": "solid" if has_times else (0, (3, 2))}


def _legend_arrow(width: float, height: float, fontsize: float, **_: Any) -> FancyArrowPatch:
    end_points = (0, height / 2), (width, height / 2)
    return FancyArrowPatch(*end_points, arrowstyle="-|>", mutation_scale=fontsize, shrinkA=0, shrinkB=0)


def _draw_roofs(
    axes: Axes, roofs: Roofs, dtypes: Mapping[str, Sequence[str | None]], places: Sequence[tuple[float, float]]
) -> tuple[list[Any], list[Box]]:
    """Draws each device's sloped bandwidth roofs and flat roofs, with their names above the slope.

    Returns the texts of the flat roofs, and many small boxes that cover the sloped texts. Point numbers avoid these
    boxes. One large box would also cover kernels."""
    (left, right), texts, boxes = axes.get_xlim(), [], []
    text_style: dict[str, Any] = {"fontsize": 7.5, "textcoords": "offset points", "path_effects": _TEXT_HALO}
    for device, colour in roofs.colours.items():
        if not dtypes[device]:  # none of its kernels computes
            continue
        ceilings = [ceiling for ceiling in roofs.ceilings if ceiling.device == device]
        sorted_ceilings, names = sorted(ceilings, key=lambda ceiling: -ceiling.hbm_bytes_per_s), []
        for ceiling in sorted_ceilings:
            line: dict[str, Any] = {"linestyle": _DASHES[ceiling.kind], "color": colour, "linewidth": 1.2, "zorder": 2}
            rate = ceiling.hbm_bytes_per_s
            roof_rates = {dtype: roof_flops_per_s(ceiling, dtype) for dtype in dtypes[device]}
            flat_rates = sorted(set(roof_rates.values()))
            axes.plot([left, flat_rates[-1] / rate], [left * rate, flat_rates[-1]], **line)
            for roof_rate in flat_rates:
                axes.plot([roof_rate / rate, right], [roof_rate] * 2, **line)
                dtype_text = "/".join(dtype or "fp32 vector" for dtype in roof_rates if roof_rates[dtype] == roof_rate)
                names.append((roof_rate, f"{dtype_text} {si(roof_rate)}FLOP/s, {roofs.name(ceiling)}"))
        name_y = 0.0
        for roof_rate, name in sorted(names):
            roof_corner = (roof_rate / sorted_ceilings[0].hbm_bytes_per_s, roof_rate)
            y = float(axes.transData.transform(roof_corner)[1]) * 72 / _DPI
            name_y = max(name_y + 9.5, y)  # at least one line of text between two names
            texts.append(axes.annotate(name, roof_corner, (-7, name_y - y), ha="right", va="center", **text_style))
        name = ", ".join(f"{si(ceiling.hbm_bytes_per_s)}B/s {roofs.name(ceiling)}" for ceiling in sorted_ceilings)
        boxes += _write_along(axes, sorted_ceilings[0].hbm_bytes_per_s, name, places, [*map(_box, texts)], text_style)
    return texts, boxes


def _write_along(
    axes: Axes,
    rate: float,
    name: str,
    places: Sequence[tuple[float, float]],
    names: Sequence[Box],
    text: Mapping[str, Any],
) -> list[Box]:
    """Writes `name` along the sloped roofline of the bandwidth `rate`. Chooses the position that covers the fewest
    markers and texts. `places` holds the markers' positions, and `names` the boxes of the other texts. Returns small
    boxes that together cover the new text."""
    x_min = max(axes.get_xlim()[0], axes.get_ylim()[0] / rate)
    (x0, y0), (x1, y1) = axes.transData.transform([(x_min, x_min * rate), (10 * x_min, 10 * x_min * rate)]) * 72 / _DPI
    angle = atan2(y1 - y0, x1 - x0)
    marker_points = axes.transData.transform(places) * 72 / _DPI
    placements: list[tuple[int, tuple[float, float], list[tuple[float, float]]]] = []
    for text_distance in range(20, 320, 10):
        text_offset = (text_distance * cos(angle) - 3 * sin(angle), text_distance * sin(angle) + 3 * cos(angle))
        x, y = x0 + text_offset[0] - 4 * sin(angle), y0 + text_offset[1] + 4 * cos(angle)
        text_xys = [(float(x + t * cos(angle)), float(y + t * sin(angle))) for t in range(0, 4 * len(name), 4)]
        covered_count = sum(any(hypot(x - a, y - b) < 10 for a, b in text_xys) for x, y in marker_points)
        covered_count += sum(any(overlap((a - 4, b - 4, a + 4, b + 4), box) for a, b in text_xys) for box in names)
        placements.append((covered_count, text_offset, text_xys))
    _, text_offset, text_xys = min(placements, key=lambda candidate: candidate[0])  # the lowest with least covered
    text_style: dict[str, Any] = {"rotation": degrees(angle), "rotation_mode": "anchor", "va": "bottom", **text}
    axes.annotate(name, (x_min, x_min * rate), text_offset, **text_style)
    return [(x - 4, y - 4, x + 4, y + 4) for x, y in text_xys]


def _draw_marker(axes: Axes, point: Point, x: float, y: float, colour: str) -> None:
    if point.seconds is None:
        axes.plot([x], [y], "x", color=GREY, markersize=6.5, markeredgewidth=1.6, zorder=5)
        return
    face_colour = colour if point.traffic_basis == "counted" and not point.noisy else "white"
    marker_style: dict[str, Any] = {"markeredgewidth": 1.4, "markeredgecolor": colour, "markerfacecolor": face_colour}
    marker_style["alpha"] = _ALPHA if point.noisy else 1.0
    marker, marker_size = ("*", 9.5) if point.published else (_MARKERS[point.role], 6.5)
    axes.plot([x], [y], marker, markersize=marker_size, zorder=5, **marker_style)


def _box(artist: Any) -> Box:
    """Returns the bounding box of a drawn object, in typographic points (1/72 inch)."""
    min_x, min_y, max_x, max_y = (float(edge_pixels) * 72 / _DPI for edge_pixels in artist.get_window_extent().extents)
    return min_x, min_y, max_x, max_y


def _draw_numbers(
    axes: Axes,
    points: Numbered,
    places: Sequence[tuple[float, float]],
    occupied: Sequence[Box],
    colours: Mapping[str, str],
) -> None:
    marker_points = [(float(x) * 72 / _DPI, float(y) * 72 / _DPI) for x, y in axes.transData.transform(places)]
    number_sizes = [(2.4 * len(str(point_number)) + 0.6, 3.6) for point_number, _ in points]
    label_offsets = place_labels(marker_points, number_sizes, _box(axes), occupied)
    line_style: dict[str, Any] = {"arrowstyle": "-", "color": "#777777", "linewidth": 0.5, "shrinkA": 3, "shrinkB": 3}
    for (point_number, point), point_xy, label_offset in zip(points, places, label_offsets, strict=True):
        axes.annotate(
            str(point_number),
            point_xy,
            label_offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=7.5,
            weight="bold",
            color=colours[point.op],
            path_effects=_TEXT_HALO,
            arrowprops=line_style if hypot(*label_offset) > NEAR_RADIUS + 0.1 else None,
            zorder=6,
        )


def _legend_handles(points: Numbered, roofs: Roofs) -> list[Line2D | FancyArrowPatch]:
    shown_points = [point for _, point in points]
    timed_points = [point for point in shown_points if point.seconds is not None]
    dot: dict[str, Any] = {"linestyle": "none", "color": INK, "markersize": 6}
    handles: list[Line2D | FancyArrowPatch] = [
        Line2D([], [], marker=marker, label=role, markerfacecolor="white", **dot)
        for role, marker in _MARKERS.items()
        if any(point.role == role and not point.published for point in timed_points)
    ]
    if any(point.noisy for point in timed_points):
        handles.append(Line2D([], [], marker="o", label="pale: NOISY", markerfacecolor="white", alpha=_ALPHA, **dot))
    if any(point.published for point in timed_points):
        handles.append(Line2D([], [], marker="*", label="published by others", markerfacecolor="white", **dot))
    for byte_basis, fill_name, marker_fill in (("counted", "filled", INK), ("modelled", "hollow", "white")):
        if any(point.traffic_basis == byte_basis and not point.published and not point.noisy for point in timed_points):
            handles.append(
                Line2D([], [], marker="o", label=f"{fill_name}: bytes {byte_basis}", markerfacecolor=marker_fill, **dot)
            )
    if len(timed_points) < len(shown_points):
        grey_style: dict[str, Any] = {"linestyle": "none", "color": GREY, "markeredgewidth": 1.6}
        handles.append(Line2D([], [], marker="x", label="not timed: the most that its roof allows", **grey_style))
    if arrow_ends := arrows(shown_points):
        arrow_style = _arrow(*arrow_ends[0], INK)
        handles.append(FancyArrowPatch((0, 0), (1, 0), label="naive to optimized", **arrow_style))
    for device, device_letter in roofs.letters.items():
        if device_letter:
            handles.append(Line2D([], [], color=roofs.colours[device], linewidth=3, label=f"{device_letter}: {device}"))
    for ceiling_kind, is_noisy in dict.fromkeys((ceiling.kind, bool(ceiling.noise)) for ceiling in roofs.ceilings):
        ceiling_label = f"ceiling, {KIND_NAMES[ceiling_kind]}{', NOISY' if is_noisy else ''}"
        handles.append(Line2D([], [], color="black", linestyle=_DASHES[ceiling_kind], label=ceiling_label))
    return handles


def _draw_movement(axes: Axes, points: Numbered, roofs: Roofs, colours: Mapping[str, str]) -> None:
    """Draws the plot panel for kernels without FLOPs. The bar of a kernel shows its fraction of the memory
    bandwidth."""
    bar_ends, roof_by_device = [], {}
    for row_index, (_, point) in enumerate(points):
        roof = roofs.of(point)
        roof_by_device[roof.device] = roof
        reached_fraction = 1.0
        if point.seconds is not None:
            reached_fraction = point.traffic_bytes / point.seconds / roof.hbm_bytes_per_s
            axes.plot([0, reached_fraction], [row_index, row_index], color=colours[point.op], linewidth=1.2, zorder=3)
        _draw_marker(axes, point, reached_fraction, row_index, colours[point.op])
        bar_ends.append(reached_fraction)
    for ceiling in roofs.ceilings:
        if ceiling.device in roof_by_device:
            bandwidth_ratio = ceiling.hbm_bytes_per_s / roof_by_device[ceiling.device].hbm_bytes_per_s
            bar_ends.append(bandwidth_ratio)
            line_style: dict[str, Any] = {"color": roofs.colours[ceiling.device], "linestyle": _DASHES[ceiling.kind]}
            axes.axvline(bandwidth_ratio, linewidth=1.2, zorder=2, **line_style)
    axes.set_xlim(0, max(bar_ends) * 1.06)
    axes.set_ylim(len(points) - 0.3, -0.7)
    axes.set_yticks(range(len(points)), [str(point_number) for point_number, _ in points], fontsize=7.5, weight="bold")
    axes.tick_params(axis="y", length=0)
    for tick_label, (_, point) in zip(axes.get_yticklabels(), points, strict=True):
        tick_label.set_color(colours[point.op])
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    names = " and ".join(f"{si(roof.hbm_bytes_per_s)}B/s ({roofs.name(roof)})" for roof in roof_by_device.values())
    axes.set_xlabel(f"no FLOPs: bytes moved per second, over {names}")
