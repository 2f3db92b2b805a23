"""The figure of bytes by level: a panel for each level of memory, a bar for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.patches import Patch

from rooflab.bench.records.record import Record
from rooflab.bench.report.pictures.drawing import INK, LOST, PALE, READ, WRITTEN, new_figure, note, save, where
from rooflab.bench.report.pictures.levels import PREFIX

MEGA, KILO = 1e6, 1e3
ROOM = 1.5
"""Of an axis over its longest bar, for the text behind the bar."""
NOTES = (
    "Compiled kernels: counted in the emulator, which ran all of the sm_90a code and compared its values. HBM: each "
    "32-byte sector of a tensor once a launch, as if a launch found L2 empty and L2 kept all of it.",
    "naive: from the operands of torch's calls, each from HBM and back; hatched: products by 128 x 128 tiles, a model "
    "of torch's library. What torch's kernels do in shared memory is not seen. L2 to SM: asked for by loads, stores, "
    "cp.async and TMA, hits in L1 not taken off; whole sectors are named where they are more. Turns of 128 bytes: "
    "those of cp.async, TMA and wgmma are not among them.",
)


class Part(NamedTuple):
    """A piece of a bar."""

    value: float
    colour: str
    hatched: bool = False


class Bar(NamedTuple):
    """One kernel's bar in a panel."""

    parts: tuple[Part, ...]
    text: str


class Panel(NamedTuple):
    """One level."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def panels_of(records: Sequence[Record]) -> list[Panel]:
    """The levels from far to near, each with a bar for every record; an empty bar where nothing is known."""
    turns = [_turns(record) for record in records]
    return [
        Panel("HBM", "MB", tuple(_moved(record, "hbm") for record in records)),
        Panel("L2 to SM", "MB", tuple(_moved(record, "l2") for record in records)),
        Panel("shared memory, in and out", "MB", tuple(_moved(record, "shared") for record in records)),
        *(
            [Panel("shared memory, turns of loads and stores", "thousand", tuple(turns))]
            if any(bar.parts for bar in turns)
            else []
        ),
    ]


def _moved(record: Record, level: str) -> Bar:
    values = {name: record.metrics.get(f"{PREFIX}{level}_{name}_bytes") for name in ("read", "write", "modelled")}
    if values["read"] is None or values["write"] is None:
        return Bar((), "not seen, inside torch's kernels")
    read, write, modelled = (float(values[name] or 0.0) / MEGA for name in ("read", "write", "modelled"))
    parts = (Part(read - modelled, READ), Part(modelled, READ, hatched=True), Part(write, WRITTEN))
    text = f"{number(read + write)} MB: {number(read)} read, {number(write)} written"
    sectors = [record.metrics.get(f"{PREFIX}{level}_{name}_sector_bytes") for name in ("read", "write")]
    in_sectors = sum(value or 0.0 for value in sectors) / MEGA
    if in_sectors > read + write:
        text += f"; in sectors {number(in_sectors)}"
    return Bar(tuple(part for part in parts if part.value > 0), text)


def _turns(record: Record) -> Bar:
    taken, least = (record.metrics.get(f"{PREFIX}shared_wavefronts{end}") for end in ("", "_least"))
    if taken is None or least is None:
        return Bar((), "not seen, inside torch's kernels")
    parts = (Part(least / KILO, PALE), Part((taken - least) / KILO, LOST))
    lost = f"{number((taken - least) / KILO)} of them lost to bank conflicts" if taken > least else "no bank conflict"
    return Bar(tuple(part for part in parts if part.value > 0), f"{number(taken / KILO)} thousand, {lost}")


def number(value: float) -> str:
    """Three digits, all of those before the point."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw_levels(records: Sequence[Record], folder: Path) -> Path:
    """Writes `bytes-<op>.png`; its path.  The records are of one op, case and scheme.

    Raises `ValueError` where there are none, or where they are of several.
    """
    about = {(record.op, record.case_id, record.scheme) for record in records}
    if len(about) != 1:
        raise ValueError(f"records: expected those of one op, case and scheme, got {len(about)}")
    panels = panels_of(records)
    first = records[0]
    figure = new_figure(9.6, 1.7 + len(panels) * (0.42 + 0.27 * len(records)))
    figure.suptitle(
        f"{first.op}: bytes moved at each level of memory, no kernel timed",
        fontsize=13,
        weight="bold",
        x=0.01,
        ha="left",
    )
    rows = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(rows, panels, strict=True):
        _draw(axes, panel, [str(record.kernel) for record in records])
    least = (first.least_bytes or 0.0) / MEGA
    rows[0].axvline(least, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    rows[0].set_title(
        f"{first.case_id}, {first.scheme}; the op needs {number(least)} MB (dashed)",
        fontsize=8.5,
        loc="right",
        color=INK,
    )
    patches = [Patch(color=READ, label="read"), Patch(color=WRITTEN, label="written")]
    if any(part.hatched for panel in panels for bar in panel.bars for part in bar.parts):
        patches.append(Patch(facecolor="white", edgecolor=READ, hatch="////", label="read, modelled"))
    if any(part.colour == LOST for panel in panels for bar in panel.bars for part in bar.parts):
        patches.append(Patch(color=LOST, label="lost to bank conflicts"))
    rows[1].legend(handles=patches, fontsize=8.5, loc="lower right", frameon=False)
    note(figure, [*NOTES, f"{where(first)} Numbers in {first.run_id}.jsonl."])
    return save(figure, folder / f"bytes-{first.op}.png")


def _draw(axes: Any, panel: Panel, names: Sequence[str]) -> None:
    for place, bar in enumerate(panel.bars):
        left = 0.0
        for part in bar.parts:
            style = {"facecolor": "white", "hatch": "////"} if part.hatched else {"facecolor": part.colour}
            axes.barh(place, part.value, left=left, height=0.66, edgecolor=part.colour, linewidth=0.6, **style)
            left += part.value
        axes.annotate(bar.text, (left, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)
    longest = max((sum(part.value for part in bar.parts) for bar in panel.bars), default=0.0)
    axes.set_xlim(0, (longest or 1.0) * ROOM)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(f"{panel.title} ({panel.unit})", fontsize=10, loc="left", weight="bold")
    axes.tick_params(axis="x", labelsize=7.5)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.locator_params(axis="x", nbins=6)
    axes.spines[["top", "right"]].set_visible(False)
