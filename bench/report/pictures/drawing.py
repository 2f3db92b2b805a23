"""What the pictures have in common: colours that colour-blind readers tell apart, and files that change only with what
is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rooflab.bench.records.environment import Environment
from rooflab.bench.records.record import Record

READ, WRITTEN, LOST, INK, PALE = "#0072b2", "#e69f00", "#d55e00", "#333333", "#8a8a8a"
"""Of Okabe and Ito's colours, and two greys."""
DPI = 130
NOTE_CHARACTERS_PER_INCH = 17
"""At the notes' size."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure on white."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG whole, with no date and no version in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    figure.savefig(partial, format="png", metadata={"Software": None})
    partial.replace(path)
    return path


def where(made: Record | Environment) -> str:
    """The commit at which something was made."""
    changed = " with uncommitted changes" if made.dirty else ""
    return f"Commit {(made.commit or 'unknown')[:10]}{changed}."


def note(figure: Figure, texts: Sequence[str]) -> None:
    """Texts below the panels, in lines as long as the figure is wide."""
    lines = [line for text in texts for line in wrap(text, int(NOTE_CHARACTERS_PER_INCH * figure.get_figwidth()))]
    figure.supxlabel("\n".join(lines), fontsize=8, color=INK, x=0.01, ha="left")
