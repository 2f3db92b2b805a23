"""Draws the list beside a roofline figure: number, kernel, intensity, rate and fraction of the bound of each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from rooflab.roofline.model import Ceilings
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import si, three_digits
from rooflab.roofline.points import KIND_NAMES, Point, plotted_flops_per_s

COLOURS = "#0072b2 #d55e00 #009e73 #b8468c #8c564b #3a95c9 #a67c00 #6a3d9a #c62828 #17806d #5a5a5a #7a8b00".split()
GREY, INK = "#8a8a8a", "#444444"
WIDTH_INCHES, ROW_IN = 14.0, 0.165
# Left or right edge of each column of the list, as a fraction of the figure's width.
COLUMN_POSITIONS = (0.662, 0.668, 0.86, 0.925, 0.985)
CASE_X_OFFSET, NAME_WIDTH = 0.105, 0.15  # where a case begins beside its op's name; the room of a kernel's name
MAX_LINE_CHARACTERS = 500  # characters in the figure's width; more would be smaller than 4 points
CASE_CHARACTERS = 46  # a longer case does not fit to the right of its op's name

Numbered = Sequence[tuple[int, Point]]


class Roofs:
    """The ceilings (peak rates) of a figure. If there are several devices, each device has a letter and a colour."""

    def __init__(self, ceilings: Sequence[Ceilings]):
        self.ceilings = ceilings
        devices = list(dict.fromkeys(ceiling.device for ceiling in ceilings))
        has_letters = len(devices) > 1
        self.letters = {
            device: chr(ord("A") + device_index) if has_letters else "" for device_index, device in enumerate(devices)
        }
        line_hues = ["black", *COLOURS[7:], *COLOURS[:7]]
        self.colours = {device: line_hues[device_index % len(line_hues)] for device_index, device in enumerate(devices)}

    def of(self, point: Point) -> Ceilings:
        """Returns the ceilings (peak rates) of a point's device. If some of them are measured, returns the measured
        ceilings. Otherwise returns the first ceilings of this device in the figure."""
        ceilings = [ceiling for ceiling in self.ceilings if point.device in (None, ceiling.device)]
        return next((ceiling for ceiling in ceilings if ceiling.kind == "measured"), ceilings[0])

    def name(self, ceiling: Ceilings) -> str:
        """Returns the label of a roof: its kind and the letter of its device."""
        return f"{KIND_NAMES[ceiling.kind]} {self.letters[ceiling.device]}".strip()


def write_text(figure: Figure, x: float, y: float, text: str, room: float, **style: Any) -> None:
    """Writes text without math markup. Cuts a long text, then shrinks it to `room` (a fraction of the figure)."""
    shown_text = visible(text)
    max_characters = int(room * MAX_LINE_CHARACTERS)
    shown_text = shown_text if len(shown_text) <= max_characters else f"{shown_text[: max_characters - 1]}…"
    text_artist = figure.text(x, y, shown_text, parse_math=False, **style)
    text_width = text_artist.get_window_extent().width / (WIDTH_INCHES * figure.dpi)
    text_artist.set_fontsize(float(text_artist.get_fontsize()) * min(1.0, room / text_width if text_width else 1.0))


def draw_list(figure: Figure, rows: Numbered, roofs: Roofs, colours: Mapping[str, str]) -> None:
    """Draws each point's number, kernel, intensity, rate and fraction of the bound, under headings for op and case."""
    figure_height = figure.get_figheight()
    y = figure_height - 0.5

    def write(cells: Sequence[str], **style: Any) -> None:
        for x, cell, text_side in zip(
            COLUMN_POSITIONS, cells, ("right", "left", "right", "right", "right"), strict=True
        ):
            write_text(figure, x, y / figure_height, cell, NAME_WIDTH, ha=text_side, va="center", fontsize=7.5, **style)

    write(("", "kernel", "FLOP / byte", "reached", "of bound"), color=INK)
    heading_key = None
    for point_number, point in rows:
        y -= ROW_IN
        if heading_key != point.work:
            heading_key = point.work
            case = f"{roofs.letters.get(point.device or '', '')} {point.case}".strip()
            y -= ROW_IN * 0.15
            left_style: dict[str, Any] = {"ha": "left", "va": "center"}
            bold_style: dict[str, Any] = {"size": 7.5, "weight": "bold", "color": colours[point.op], **left_style}
            write_text(figure, COLUMN_POSITIONS[1], y / figure_height, point.op, CASE_X_OFFSET, **bold_style)
            case_fits = len(case) <= CASE_CHARACTERS
            y -= 0.0 if case_fits else ROW_IN * 0.9
            x = COLUMN_POSITIONS[1] + (CASE_X_OFFSET if case_fits else 0.0)
            write_text(figure, x, y / figure_height, case, COLUMN_POSITIONS[-1] - x, size=6.5, color=INK, **left_style)
            y -= ROW_IN
        role_text = "published" if point.published else point.role
        name = point.label if point.label == role_text or point.role == "benchmark" else f"{point.label} ({role_text})"
        intensity = "none" if not point.flops else three_digits(point.intensity)
        work_amount, unit = (point.flops, "FLOP/s") if point.flops else (point.traffic_bytes, "B/s")
        if point.seconds is None:
            roof = roofs.of(point)
            roof_rate = plotted_flops_per_s(point, roof) if point.flops else roof.hbm_bytes_per_s
            write((str(point_number), name, intensity, f"≤ {si(roof_rate)}{unit}", "not timed"), color=GREY)
            continue
        fraction = "NOISY" if point.noisy else f"{point.bound_s / point.seconds:.0%}"
        write((str(point_number), name, intensity, f"{si(work_amount / point.seconds)}{unit}", fraction), color="black")
