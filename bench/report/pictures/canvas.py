"""The parts that all figures of the documentation share, and the figure of the bytes at each level of memory.

Colour-blind readers can distinguish the colours.  A file changes only if its content changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from rooflab.bench.core import Environment, Record
from rooflab.bench.report.pictures.levels import PREFIX
from rooflab.kernels._files import write_whole
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import three_digits
from rooflab.roofline.plot import own_settings

READ, WRITTEN, LOST, INK, PALE = "#0072b2", "#e69f00", "#d55e00", "#333333", "#8a8a8a"
"""The colours of Okabe and Ito, and two tones of grey."""
DPI = 130
WIDTH_IN = 5.6
"""The width of a figure whose panels are below each other.  On a phone 358 pixels wide, 9 points are 8 pixels high."""
NOTE_CHARACTERS_PER_INCH = 17
"""The number of characters of a note that fit into an inch."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """Returns an empty figure on a white ground."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG atomically, without date and version.  A `$` in a name does not begin a formula."""
    figure.draw_without_rendering()  # an axis writes its numbers only at this call
    for text in figure.findobj(Text):
        text.set_parse_math("mathdefault" in text.get_text())  # an axis writes its powers of ten in this mode
        text.set_text(visible(text.get_text(), keep="\n"))
    content = BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return write_whole(path, content.getvalue())


def where(made: Record | Environment) -> str:
    """The commit at which a record or an environment was made."""
    changed = " with uncommitted changes" if made.dirty else ""
    return f"Commit {(made.commit or 'unknown')[:10]}{changed}."


def note(figure: Figure, texts: Sequence[str]) -> None:
    """Adds texts below the panels; the lines are as long as the figure is wide."""
    lines = [line for text in texts for line in wrap(text, int(NOTE_CHARACTERS_PER_INCH * figure.get_figwidth()))]
    figure.supxlabel("\n".join(lines), fontsize=8, color=INK, x=0.01, ha="left")


MEGA, KILO = 1e6, 1e3
ROOM = 2.3
"""The length of the axis divided by its longest bar.  The rest of the axis has the text behind the bar."""
LEVEL_NOTES = (
    "Compiled kernels: counted in the emulator, which ran all of the sm_90a code and compared its values. HBM: each "
    "32-byte sector of a tensor once a launch, as if a launch found L2 empty and L2 kept all of it.",
    "naive: from the operands of torch's calls, each from HBM and back; hatched: products by 128 x 128 tiles, a model "
    "of torch's library. What torch's kernels do in shared memory is not seen. L2 to SM: asked for by loads, stores, "
    "cp.async and TMA, hits in L1 not taken off; whole sectors are named where they are more. Turns of 128 bytes: "
    "those of cp.async, TMA and wgmma are not among them.",
)


STYLES: Mapping[str, Mapping[str, Any]] = {
    "read": {"facecolor": READ, "edgecolor": READ},
    "read, modelled": {"facecolor": "white", "edgecolor": READ, "hatch": "////"},
    "written": {"facecolor": WRITTEN, "edgecolor": WRITTEN},
    "_least": {"facecolor": PALE, "edgecolor": PALE},
    "lost to bank conflicts": {"facecolor": LOST, "edgecolor": LOST},
}
"""By name in the legend, the drawing options of a part of a bar.  Names with `_` first are not in the legend."""
UNSEEN = "not seen, inside torch's kernels"


class Panel(NamedTuple):
    """The bars of one level of memory: for each record, the parts of its bar and the text behind the bar."""

    title: str
    parts: Mapping[str, list[float]]
    texts: list[str]


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """The levels of memory from far to near, each with one bar for every record.  A bar without data is empty."""
    levels = {"HBM": "hbm", "L2 to SM": "l2", "shared memory, in and out": "shared"}
    panels = [_moved(f"{title} (MB)", level, records) for title, level in levels.items()]
    turns = [[record.metrics.get(f"{PREFIX}shared_wavefronts{end}") for end in ("_least", "")] for record in records]
    if any(turned for _, turned in turns):
        parts: dict[str, list[float]] = {"_least": [], "lost to bank conflicts": []}
        texts = []
        for fewest, turned in turns:
            least, lost = (fewest or 0.0) / KILO, ((turned or 0.0) - (fewest or 0.0)) / KILO
            parts["_least"].append(least)
            parts["lost to bank conflicts"].append(lost)
            conflicts = f"{three_digits(lost)} of them lost to bank conflicts" if lost > 0 else "no bank conflict"
            texts.append(UNSEEN if turned is None else f"{three_digits(least + lost)} thousand, {conflicts}")
        panels.append(Panel("shared memory, turns of loads and stores (thousand)", parts, texts))
    return panels


def _moved(title: str, level: str, records: Sequence[Record]) -> Panel:
    parts: dict[str, list[float]] = {"read": [], "read, modelled": [], "written": []}
    texts = []
    for record in records:
        moved = {name: value / MEGA for name, value in record.metrics.items() if name.startswith(f"{PREFIX}{level}_")}
        names = ("read", "modelled", "write", "read_sector", "write_sector")
        read, modelled, write, *sectors = (moved.get(f"{PREFIX}{level}_{name}_bytes", 0.0) for name in names)
        for lengths, value in zip(parts.values(), (read - modelled, modelled, write), strict=True):
            lengths.append(value)
        text = f"{three_digits(read + write)} MB: {three_digits(read)} read, {three_digits(write)} written"
        if sum(sectors) > read + write:
            text += f"; in sectors {three_digits(sum(sectors))}"
        texts.append(text if moved else UNSEEN)
    return Panel(title, parts, texts)


@own_settings
def draw_levels(records: Sequence[Record], folder: Path) -> Path:
    """Writes `bytes-<op>.png` and returns its path.  All records have the same op, case and scheme.

    Raises `ValueError` if there are no records, or if they have several ops, cases or schemes.
    """
    about = {(record.op, record.case_id, record.scheme) for record in records}
    if len(about) != 1:
        raise ValueError(f"records: expected those of one op, case and scheme, got {len(about)}")
    panels = panels_of(records)
    first = records[0]
    figure = new_figure(WIDTH_IN, 3.0 + len(panels) * (0.42 + 0.27 * len(records)))
    _title(figure, f"{first.op}: bytes moved at each level of memory, no kernel timed")
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, panel, [str(record.kernel) for record in records])
    least = (first.least_bytes or 0.0) / MEGA
    rows[0].axvline(least, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    legends = [axes.get_legend_handles_labels() for axes in rows]
    named = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    rows[1].legend(named.values(), named, fontsize=8.5, loc="lower right", frameon=False)
    about_case = f"{first.case_id}, {first.scheme}; the op needs {three_digits(least)} MB (dashed)."
    note(figure, [about_case, *LEVEL_NOTES, f"{where(first)} Numbers in {first.run_id}.jsonl."])
    return save(figure, folder / f"bytes-{first.op}.png")


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(fill(text, int(9 * figure.get_figwidth())), fontsize=11, weight="bold", x=0.01, ha="left")


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str]) -> None:
    ends = [0.0] * len(names)
    for part, values in panel.parts.items():
        if any(values):
            axes.barh(range(len(names)), values, left=ends, height=0.66, linewidth=0.6, label=part, **STYLES[part])
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for place, (end, text) in enumerate(zip(ends, panel.texts, strict=True)):
        axes.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    axes.set_xlim(0, (max(ends) or 1.0) * ROOM)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(panel.title, fontsize=10, loc="left", weight="bold")
    axes.tick_params(axis="x", labelsize=9)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
