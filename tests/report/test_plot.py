"""Roofline figures: the places of their parts, and files that are written and are the same each time."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from rooflab.roofline.model import Ceilings
from rooflab.roofline.plot import roofline_figure, roofline_files
from rooflab.roofline.points import Point, arrows, place_labels, plotted_flops_per_s, that_matter

SHEET = Ceilings("toy", "datasheet", 100.0, {"bf16": 1000.0}, 50.0)
MEASURED = Ceilings("toy", "measured", 80.0, {"bf16": 800.0}, 40.0)

NAIVE = Point("naive", "gemm", "M=8", "naive", "bf16", 1000.0, 1000.0, "counted", 2.0, 20.0)
LIBRARY = replace(NAIVE, label="library", role="library", traffic_bytes=120.0, traffic_basis="modelled", seconds=2.5)
FUSED = replace(NAIVE, label="fused", role="optimized", traffic_bytes=100.0, seconds=4.0)
UNTIMED = Point("naive", "rmsnorm", "T=4", "naive", None, 300.0, 100.0, "modelled", 1.0, None)
MOVING = Point("naive", "embedding", "T=4", "naive", None, 0.0, 200.0, "counted", 2.0, 5.0)


def markers(axes: Axes) -> dict[tuple[float, float], tuple[str, str]]:
    """Marker and face colour of each point by its place."""
    drawn = [line for line in axes.get_lines() if line.get_marker() not in ("None", "", None)]
    places = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in drawn]
    return {
        place: (line.get_marker(), to_hex(line.get_markerfacecolor()))
        for place, line in zip(places, drawn, strict=True)
    }


def ends_of_arrows(axes: Axes) -> set[tuple[Any, Any]]:
    """Start and end of each arrow: a note without a text."""
    return {(note.xyann, note.xy) for note in axes.texts if not note.get_text()}


def words(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.texts}


def legend_of(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_points_stand_at_their_traffic_intensity_and_what_they_reached() -> None:
    (axes,) = roofline_figure([NAIVE, LIBRARY, FUSED], [SHEET]).axes
    shown = markers(axes)
    assert shown.keys() == {(1.0, 50.0), (1000 / 120, 400.0), (10.0, 250.0)}
    assert shown[1000 / 120, 400.0] == ("s", "#ffffff"), "hollow: modelled"
    marker, face = shown[10.0, 250.0]
    assert marker == "o" and face != "#ffffff", "filled: counted"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_what_was_not_timed_is_a_cross_on_the_roof_and_called_a_bound() -> None:
    figure = roofline_figure([NAIVE, UNTIMED], [SHEET])
    (axes,) = figure.axes
    assert markers(axes)[3.0, 50.0][0] == "x", "under the vector roof"
    assert "not timed: the most that its roof allows" in legend_of(axes)
    assert {"not timed", "≤ 50 FLOP/s"} <= words(figure)
    assert plotted_flops_per_s(replace(UNTIMED, traffic_bytes=3000.0), SHEET) == 10.0, "under the diagonal"
    (axes,) = roofline_figure([UNTIMED], [SHEET, MEASURED]).axes
    assert (3.0, 40.0) in markers(axes), "under the measured ceiling where there is one"


def test_an_arrow_leads_from_naive_to_the_fastest_optimized_kernel() -> None:
    slow = replace(FUSED, label="slow", seconds=9.0)
    assert arrows([NAIVE, LIBRARY, slow, FUSED, replace(FUSED, case="M=9")]) == [(NAIVE, FUSED)]
    assert arrows([NAIVE, LIBRARY]) == []
    naive, fused = (replace(point, seconds=None) for point in (NAIVE, FUSED))
    more = replace(fused, label="more", traffic_bytes=500.0)
    assert arrows([naive, more, fused]) == [(naive, fused)], "of what was not timed, to the least traffic"
    (axes,) = roofline_figure([NAIVE, FUSED], [SHEET]).axes
    assert ends_of_arrows(axes) == {((1.0, 50.0), (10.0, 250.0))}


def test_a_figure_has_the_fifteen_points_that_matter() -> None:
    def ladder(op: str, slow: float) -> list[Point]:
        return [replace(one, op=op, seconds=slow * (one.seconds or 0.0)) for one in (NAIVE, LIBRARY, FUSED)]

    few = [point for op in "abcde" for point in ladder(op, 1.0)]
    assert that_matter(few) == few
    many = [point for place in range(20) for point in ladder(f"op{place}", 1.0 + place)]
    kept = that_matter(many)
    assert len(kept) == 15 and {point.label for point in kept} == {"library"}, "the fastest of each op"
    assert {point.op for point in kept} == {f"op{place}" for place in range(5, 20)}, "where most time is lost"
    still = [replace(MOVING, op=f"moving{place}") for place in range(5)]
    assert sum(not point.flops for point in that_matter([*many, *still])) == 3 and that_matter(still) == still
    figure = roofline_figure(many, [SHEET])
    assert "15 of 60 points are drawn, of each op the fastest kernel first" in words(figure)
    assert len(markers(figure.axes[0])) == 15


def test_pure_data_movement_has_a_panel_of_its_own() -> None:
    plane, bars = roofline_figure([NAIVE, MOVING, replace(MOVING, label="other", seconds=None)], [SHEET]).axes
    assert markers(plane).keys() == {(1.0, 50.0)} and markers(bars).keys() == {(0.4, 0.0), (1.0, 1.0)}
    assert "100 B/s (data sheet)" in bars.get_xlabel()
    (alone,) = roofline_figure([MOVING], [SHEET]).axes
    assert markers(alone).keys() == {(0.4, 0.0)}


@pytest.mark.parametrize("intensity", [1.0, 30.0])
def test_a_roofs_name_lies_neither_under_the_legend_nor_across_an_axis(intensity: float) -> None:
    """Points of high intensity move the frame to the right, and three kinds of roofs make names and legend long."""
    rates = {"bf16": 1000.0, "fp8_e4m3": 2000.0}
    kinds: Any = {"datasheet": 1.0, "measured": 0.8, "at_clock": 0.9}
    ceilings = [
        Ceilings("toy", kind, 3.4 * part, {name: rate * part for name, rate in rates.items()}, 67.0 * part)
        for kind, part in kinds.items()
    ]
    points = [replace(UNTIMED, case=str(dtype), dtype=dtype, flops=100 * intensity) for dtype in (None, *rates)]
    figure = roofline_figure(points, ceilings)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    frame, legend = axes.get_window_extent(), axes.get_legend()
    assert legend is not None
    for text in (text for text in axes.texts if "FLOP/s" in text.get_text()):
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1, text
        assert not box.overlaps(legend.get_window_extent()), text


def test_several_devices_have_letters_and_roofs_of_their_own_and_no_arrow_between_them() -> None:
    faster = replace(SHEET, device="fast", hbm_bytes_per_s=2000.0, tensor_flops_per_s={"bf16": 20000.0})
    ours = [replace(one, device="toy") for one in (NAIVE, FUSED, MOVING)]
    theirs = [replace(one, device="fast", seconds=(one.seconds or 0) / 20) for one in (NAIVE, FUSED, MOVING)]
    figure = roofline_figure([*ours, *theirs], [SHEET, faster])
    plane, bars = figure.axes
    assert ends_of_arrows(plane) == {((1.0, 50.0), (10.0, 250.0)), ((1.0, 1000.0), (10.0, 5000.0))}
    assert {"A: toy", "B: fast"} <= set(legend_of(plane)) and {"A M=8", "B M=8"} <= words(figure)
    assert {"100 B/s data sheet A", "2 kB/s data sheet B"} <= {text.get_text() for text in plane.texts}
    assert markers(bars).keys() == {(0.4, 0.0), (0.4, 1.0)}, "each over its own bandwidth"


def test_the_users_settings_of_matplotlib_do_not_reach_a_figure() -> None:
    points = [NAIVE, replace(FUSED, label="a_$x$ $"), UNTIMED, MOVING]
    ours = roofline_files(points, [SHEET])
    assert ours["png"].startswith(b"\x89PNG") and b"<svg" in ours["svg"]
    mine: Any = {"text.usetex": True, "axes.facecolor": "black", "text.color": "white", "lines.linewidth": 9.0}
    with rc_context(mine):
        assert roofline_files(points, [SHEET]) == ours, "the same points give the same file"
    root = Path(__file__).parents[2]
    for file in [file for folder in ("bench", "roofline", "results") for file in (root / folder).rglob("*.py")]:
        text = file.read_text()
        draws = re.search(r"\bnew_figure\(|[ =]Figure\(", text.replace("def new_figure", ""))
        assert not draws or "@with_own_settings" in text, file


def test_thirty_numbers_on_one_spot_do_not_cover_each_other() -> None:
    spots = [(300.0 + index % 3, 300.0 + index % 5) for index in range(30)]
    sizes, frame = [(5.0, 3.6)] * 30, (0.0, 0.0, 600.0, 600.0)
    offsets = place_labels(spots, sizes, frame, [(310.0, 280.0, 330.0, 320.0)])
    centres = [(x + dx, y + dy) for (x, y), (dx, dy) in zip(spots, offsets, strict=True)]
    for (ax, ay), (bx, by) in combinations(centres, 2):
        assert abs(ax - bx) >= 10.0 - 1e-9 or abs(ay - by) >= 7.2 - 1e-9
    assert not any(305.0 < x < 335.0 and 276.4 < y < 323.6 for x, y in centres)
    ((dx, dy),) = place_labels([(598.0, 2.0)], [(5.0, 3.6)], frame, [])
    assert 598 + dx + 5 < 600 and 2 + dy - 3.6 > 0, "a number stays inside the frame"


def test_bad_figures_and_points_are_refused() -> None:
    other, fp8 = replace(MEASURED, device="other"), replace(NAIVE, dtype="fp8_e4m3")
    for points, ceilings, message in (
        ([], [SHEET], "points: expected at least one"),
        ([NAIVE], [SHEET, other], "ceilings: expected one device's"),
        ([fp8], [SHEET], "toy has no datasheet matrix rate for 'fp8_e4m3'"),
    ):
        with pytest.raises(ValueError, match=message):
            roofline_figure(points, ceilings)
    for field in ("traffic_bytes", "seconds"):
        with pytest.raises(ValueError, match=f"^{field}: expected above 0"):
            replace(NAIVE, **{field: 0.0})
