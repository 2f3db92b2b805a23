"""Contains functions that all figures of the documentation share.  Also draws kernels' traffic at each memory level.

The figures use colours that colour-blind readers can distinguish.  A file changes only if its content changes.
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
from rooflab.bench.report.pictures.levels import METRIC_PREFIX
from rooflab.kernels._files import write_whole
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import three_digits
from rooflab.roofline.plot import with_own_settings

READ_COLOUR, WRITTEN, LOST, INK, PALE = "#0072b2", "#e69f00", "#d55e00", "#333333", "#8a8a8a"
"""The colours of Okabe and Ito, and two tones of grey."""
DPI = 130
FIGURE_WIDTH_IN = 5.6
"""The width of a figure whose panels are below each other.  On a phone 358 pixels wide, 9 points are 8 pixels high."""
NOTE_CHARACTERS_PER_INCH = 17
"""The number of characters of a note that fit into an inch."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """Returns an empty figure with a white background."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as a PNG atomically, without date and version.  A `$` in a text does not start a formula."""
    figure.draw_without_rendering()  # an axis writes its numbers only at this call
    for text in figure.findobj(Text):
        text.set_parse_math("mathdefault" in text.get_text())  # an axis writes its powers of ten in this mode
        text.set_text(visible(text.get_text(), keep="\n"))
    png_bytes = BytesIO()
    figure.savefig(png_bytes, format="png", metadata={"Software": None})
    return write_whole(path, png_bytes.getvalue())


def where(made: Record | Environment) -> str:
    """Returns a sentence that names the commit at which a record or an environment was made."""
    changes_text = " with uncommitted changes" if made.dirty else ""
    return f"Commit {(made.commit or 'unknown')[:10]}{changes_text}."


def note(figure: Figure, texts: Sequence[str]) -> None:
    """Adds texts below a figure, and wraps their lines to the width of the figure."""
    lines = [line for text in texts for line in wrap(text, int(NOTE_CHARACTERS_PER_INCH * figure.get_figwidth()))]
    figure.supxlabel("\n".join(lines), fontsize=8, color=INK, x=0.01, ha="left")


MB, THOUSAND = 1e6, 1e3
AXIS_LENGTH_FACTOR = 2.3
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
    "read": {"facecolor": READ_COLOUR, "edgecolor": READ_COLOUR},
    "read, modelled": {"facecolor": "white", "edgecolor": READ_COLOUR, "hatch": "////"},
    "written": {"facecolor": WRITTEN, "edgecolor": WRITTEN},
    "_least": {"facecolor": PALE, "edgecolor": PALE},
    "lost to bank conflicts": {"facecolor": LOST, "edgecolor": LOST},
}
"""By name in the legend, the drawing options of a part of a bar.  Names with `_` first are not in the legend."""
UNKNOWN_TEXT = "not seen, inside torch's kernels"


class Panel(NamedTuple):
    """Holds the bars of one memory level, such as HBM.  Each record has one bar with parts and a text beside it."""

    title: str
    parts: Mapping[str, list[float]]
    texts: list[str]


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """Returns a panel of bars for each memory level, from HBM to shared memory.  Each record has one bar per panel."""
    level_names = {"HBM": "hbm", "L2 to SM": "l2", "shared memory, in and out": "shared"}
    panels = [_moved(f"{title} (MB)", level_name, records) for title, level_name in level_names.items()]
    wavefront_pairs = [
        [record.metrics.get(f"{METRIC_PREFIX}shared_wavefronts{end}") for end in ("_least", "")] for record in records
    ]
    if any(total for _, total in wavefront_pairs):
        bar_parts: dict[str, list[float]] = {"_least": [], "lost to bank conflicts": []}
        texts = []
        for min_count, total in wavefront_pairs:
            least_k, lost_k = (min_count or 0.0) / THOUSAND, ((total or 0.0) - (min_count or 0.0)) / THOUSAND
            bar_parts["_least"].append(least_k)
            bar_parts["lost to bank conflicts"].append(lost_k)
            lost_text = f"{three_digits(lost_k)} of them lost to bank conflicts" if lost_k > 0 else "no bank conflict"
            texts.append(UNKNOWN_TEXT if total is None else f"{three_digits(least_k + lost_k)} thousand, {lost_text}")
        panels.append(Panel("shared memory, turns of loads and stores (thousand)", bar_parts, texts))
    return panels


def _moved(title: str, level: str, records: Sequence[Record]) -> Panel:
    bar_parts: dict[str, list[float]] = {"read": [], "read, modelled": [], "written": []}
    texts = []
    for record in records:
        mb_by_metric = {
            name: value / MB for name, value in record.metrics.items() if name.startswith(f"{METRIC_PREFIX}{level}_")
        }
        names = ("read", "modelled", "write", "read_sector", "write_sector")
        read_mb, modelled_mb, write_mb, *sector_mb = (
            mb_by_metric.get(f"{METRIC_PREFIX}{level}_{name}_bytes", 0.0) for name in names
        )
        for bar_lengths, value in zip(bar_parts.values(), (read_mb - modelled_mb, modelled_mb, write_mb), strict=True):
            bar_lengths.append(value)
        text = f"{three_digits(read_mb + write_mb)} MB: {three_digits(read_mb)} read, {three_digits(write_mb)} written"
        if sum(sector_mb) > read_mb + write_mb:
            text += f"; in sectors {three_digits(sum(sector_mb))}"
        texts.append(text if mb_by_metric else UNKNOWN_TEXT)
    return Panel(title, bar_parts, texts)


@with_own_settings
def draw_levels(records: Sequence[Record], folder: Path) -> Path:
    """Draws the bytes that kernels move at each memory level as `bytes-<op>.png` in `folder`.  Returns the path.

    Raises `ValueError` if there are no records, or if the records have several ops, cases or schemes."""
    case_keys = {(record.op, record.case_id, record.scheme) for record in records}
    if len(case_keys) != 1:
        raise ValueError(f"records: expected those of one op, case and scheme, got {len(case_keys)}")
    panels = panels_of(records)
    first_record = records[0]
    figure = new_figure(FIGURE_WIDTH_IN, 3.0 + len(panels) * (0.42 + 0.27 * len(records)))
    title = fill(f"{first_record.op}: bytes moved at each level of memory, no kernel timed", int(9 * FIGURE_WIDTH_IN))
    figure.suptitle(title, fontsize=11, weight="bold", x=0.01, ha="left")
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, level_panel in zip(rows, panels, strict=True):
        _draw_panel(axes, level_panel, [str(record.kernel) for record in records])
    needed_mb = (first_record.least_bytes or 0.0) / MB
    rows[0].axvline(needed_mb, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    legends = [axes.get_legend_handles_labels() for axes in rows]
    legend_items = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    rows[1].legend(legend_items.values(), legend_items, fontsize=8.5, loc="lower right", frameon=False)
    case_note = f"{first_record.case_id}, {first_record.scheme}; the op needs {three_digits(needed_mb)} MB (dashed)."
    note(figure, [case_note, *LEVEL_NOTES, f"{where(first_record)} Numbers in {first_record.run_id}.jsonl."])
    return save(figure, folder / f"bytes-{first_record.op}.png")


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str]) -> None:
    bar_ends = [0.0] * len(names)
    for name, values in panel.parts.items():
        if any(values):
            axes.barh(range(len(names)), values, left=bar_ends, height=0.66, linewidth=0.6, label=name, **STYLES[name])
        bar_ends = [bar_end + length for bar_end, length in zip(bar_ends, values, strict=True)]
    for row, (bar_end, text) in enumerate(zip(bar_ends, panel.texts, strict=True)):
        axes.annotate(text, (bar_end, row), (4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    axes.set_xlim(0, (max(bar_ends) or 1.0) * AXIS_LENGTH_FACTOR)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(panel.title, fontsize=10, loc="left", weight="bold")
    axes.tick_params(axis="x", labelsize=9)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)
