"""The figure of schedules: a Gantt chart for each kernel, a row for each SM, a bar for each tile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize

from rooflab.bench.records.environment import Environment
from rooflab.bench.report.pictures.drawing import INK, LOST, new_figure, note, save, where
from rooflab.bench.report.pictures.schedule import Schedule
from rooflab.reference.spec import Case, Scheme

SOURCES = {
    "schedule": "from the schedule, no kernel timed",
    "timestamps": "from timestamps that the kernel kept",
}
NOTES = {
    "schedule": "A bar is as long as its tile has blocks of 128 x 128 scores, those that the mask hides in part "
    "included; starting and ending a tile takes no time here. Of a grid, the SM that is free first takes the next CTA.",
    "timestamps": "A bar is from a tile's first instruction to its last store, by its first warp and the device's "
    "nanosecond timer, which some cards move in steps of a microsecond. Keeping them slows the launch.",
}


def draw_schedules(
    schedules: Sequence[Schedule], case: Case, scheme: Scheme, environment: Environment, folder: Path
) -> Path:
    """Writes `schedule-flash_attention.png`; its path.  Raises `ValueError` where there is no schedule."""
    if not schedules:
        raise ValueError("schedules: expected at least one, got none")
    figure = new_figure(9.6, 1.5 + 2.15 * len(schedules))
    mask = "causal" if case["causal"] else "not causal"
    title = f"Attention's tiles over {schedules[0].sms} SMs, {mask}: {SOURCES[schedules[0].basis]}"
    figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left")
    alike = len({schedule.unit for schedule in schedules}) == 1
    rows = figure.subplots(len(schedules), 1, squeeze=False, sharex=alike)[:, 0]
    longest = max(tile.work for schedule in schedules for tile in schedule.tiles)
    colours = ScalarMappable(Normalize(0, longest), colormaps["cividis"])
    for axes, schedule in zip(rows, schedules, strict=True):
        _draw(axes, schedule, colours)
        if not alike or axes is rows[-1]:
            axes.set_xlabel(schedule.unit, fontsize=9)
    rows[0].text(
        1.0, 1.02, f"{case.id}, {scheme.name}", transform=rows[0].transAxes, fontsize=8.5, color=INK, ha="right"
    )
    bar = figure.colorbar(colours, ax=list(rows), fraction=0.025, pad=0.01, aspect=45)
    bar.set_label("blocks of 128 x 128 scores of the tile", fontsize=8.5)
    bar.ax.tick_params(labelsize=8)
    notes = [NOTES[basis] for basis in dict.fromkeys(schedule.basis for schedule in schedules)]
    notes.append(f"Dashed: the mean of all SMs, where perfect balance ends. {where(environment)}")
    note(figure, notes)
    return save(figure, folder / "schedule-flash_attention.png")


def _draw(axes: Any, schedule: Schedule, colours: ScalarMappable) -> None:
    height = 1 / schedule.ctas_per_sm
    by_lane: dict[int, list[Any]] = {}
    for tile in schedule.tiles:
        by_lane.setdefault(tile.lane, []).append(tile)
    for lane, tiles in by_lane.items():
        axes.broken_barh(
            [(tile.start, tile.end - tile.start) for tile in tiles],
            (lane * height, height),
            facecolors=[colours.to_rgba(tile.work) for tile in tiles],
            linewidth=0,
        )
    # Only where a tile begins: edges all around would hide the colours of rows this thin.
    begun = [[(tile.start, tile.lane * height), (tile.start, (tile.lane + 1) * height)] for tile in schedule.tiles]
    axes.add_collection(LineCollection(begun, colors="white", linewidths=0.6))
    axes.axvline(schedule.mean, color=LOST, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set_ylim(schedule.sms, 0)
    axes.set_xlim(0, None)
    axes.set_ylabel("SM", fontsize=9)
    axes.tick_params(labelsize=8)
    source = "" if schedule.basis == "schedule" else f", {SOURCES[schedule.basis]}"
    axes.set_title(
        f"{schedule.kernel}: the last SM ends at {schedule.imbalance:.2f}x the mean{source}", fontsize=10, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
