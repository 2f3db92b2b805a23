"""Holds what the page's figures are made of: boxes, arrows, grids and bars in SVG, and the kernels of a record."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from rooflab.roofline.numbers import si

WIDTH = 320
"""The width of a drawing in its own units.  Text of 13 units stays 12 px high on a screen 360 px wide."""
FONT_SIZE, LINE_HEIGHT = 13, 17
IN_PAGE, FILE_WIDTH, LABEL_HEIGHT = 'width="100%" style="max-width: 460px"', 330, 24
_COLOUR = re.compile(r"--(page|ink|soft|line|head|bar|read|lost): light-dark\((#\w+), (#\w+)\)")
COLOURS = {n: pair for n, *pair in _COLOUR.findall(Path(__file__).with_name("learn.css").read_text())}
"""The light and the dark colour of some names of learn.css, for drawings outside of the page."""


def size(value: float, unit: str = "B") -> str:
    """Formats bytes or another quantity with three digits: `2.24 GB`."""
    return f"{si(value)}{unit}".strip()


Pair = tuple[float, float]
Kind = Callable[[int, int], str]


class Sketch:
    """Collects the shapes of one drawing from top to bottom.  All lengths are in units of the drawing."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.height = 0.0

    def text(self, x: float, y: float, words: str, anchor: str = "start", bold: bool = False) -> None:
        """Writes a line of text whose baseline is at `y`."""
        look = f'text-anchor="{anchor}" font-weight="{600 if bold else 400}" {_paint("ink")}'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>')
        self.height = max(self.height, y + 6)

    def box(self, x: float, y: float, w: float, h: float, words: str = "", fill: str = "page") -> None:
        """Draws a box with words in its middle, or, if `words` ends with a colon, at its top left."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" {_paint(fill)} {_stroke("soft")}/>')
        self.height = max(self.height, y + h + 2)
        if words.endswith(":"):
            self.text(x + 6, y + 15, words[:-1], bold=True)
        else:
            lines = words.split("\n")
            for number, line in enumerate(lines if words else ()):
                self.text(x + w / 2, y + h / 2 + 5 + LINE_HEIGHT * (number - (len(lines) - 1) / 2), line, "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, words: str = "") -> None:
        """Draws an arrow straight down or up, with words at its right."""
        head = 6 if to_y > y else -6
        tip = f"M{to_x - 4:g} {to_y - head:g}L{to_x:g} {to_y:g}L{to_x + 4:g} {to_y - head:g}"
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}{tip}" fill="none" {_stroke("ink", 1.5)}/>')
        if words:
            self.text(x + 8, (y + to_y) / 2 + 5, words)

    def cells(self, x: float, y: float, shape: tuple[int, int], cell: Pair, kind: Kind, fill: str = "read") -> None:
        """Draws a grid of `shape` = (columns, rows).  `kind(column, row)` is "full", "hatched" or "" for each cell."""
        (columns, rows), (w, h) = shape, cell
        lines = [f"M{x + w * column:g} {y:g}v{h * rows:g}" for column in range(columns + 1)]
        lines += [f"M{x:g} {y + h * row:g}h{w * columns:g}" for row in range(rows + 1)]
        places = [(column, row) for row in range(rows) for column in range(columns)]
        marked = [(x + w * c, y + h * r, kind(c, r)) for c, r in places if kind(c, r)]
        filled = "".join(f"M{left:g} {top:g}h{w:g}v{h:g}h{-w:g}z" for left, top, _ in marked)
        strokes = "".join(f"M{left:g} {top + h:g}l{w:g} {-h:g}" for left, top, how in marked if how == "hatched")
        self.parts.append(f'<path d="{filled}" {_paint(fill)}/>')
        self.parts.append(f'<path d="{"".join(lines)}" fill="none" {_stroke("line", 0.6)}/>')
        if strokes:
            self.parts.append(f'<path d="{strokes}" fill="none" {_stroke("lost", 1.3)}/>')
        self.height = max(self.height, y + h * rows + 2)

    def bar(self, label: str, words: str, share: float) -> None:
        """Adds a bar below what is drawn.  `share` is its part of the drawing's width; `words` are its value."""
        top = self.height + 8
        self.text(2, top + 12, label)
        self.text(WIDTH - 2, top + 12, words, "end", bold=True)
        shape = f'x="2" y="{top + 17:g}" width="{max(1, 316 * share):.4g}" height="7"'
        self.parts.append(f"<rect {shape} {_paint('read')}/>")
        self.height = top + 26

    def svg(self, title: str, text: str) -> str:
        """Returns the drawing as an SVG element that says its title and `text` to a screen reader."""
        view = f'viewBox="0 0 {WIDTH} {self.height:g}" {IN_PAGE}'
        font = f'font-family="system-ui, Liberation Sans, sans-serif" font-size="{FONT_SIZE}"'
        spoken = f"<title>{escape(title)}</title><desc>{escape(text)}</desc>"
        return f'<svg xmlns="http://www.w3.org/2000/svg" {view} {font} role="img">{spoken}{"".join(self.parts)}</svg>'


def file_of(svg: str, label: str) -> str:
    """Returns a drawing below its label as the text of an SVG file, which follows the reader's light or dark scheme."""
    light, dark = ("".join(f"--{name}: {pair[tone]}; " for name, pair in COLOURS.items()) for tone in (0, 1))
    style = f"<style>svg {{ {light}}} @media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }}</style>"
    sketch = Sketch()
    sketch.parts = [f'<rect y="{-LABEL_HEIGHT}" width="100%" height="100%" {_paint("page")}/>']
    sketch.text(2, -8, label, bold=True)
    start, height, rest = re.split(rf'0 0 {WIDTH} ([\d.]+)" {IN_PAGE}', svg)
    view = f'0 {-LABEL_HEIGHT} {WIDTH} {float(height) + LABEL_HEIGHT:g}" width="{FILE_WIDTH}"'
    return start + view + rest.replace("</desc>", f"</desc>{style}{''.join(sketch.parts)}", 1) + "\n"


def _paint(colour: str) -> str:
    return f'fill="var(--{colour}, {COLOURS[colour][0]})"'


def _stroke(colour: str, width: float = 1) -> str:
    return f'stroke="var(--{colour}, {COLOURS[colour][0]})" stroke-width="{width:g}"'
