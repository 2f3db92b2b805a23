"""Draws pictures of load runs: latency against request rate, latency against throughput, and a timeline of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from rooflab.bench.load.causes import CAUSE_KINDS, spikes
from rooflab.bench.load.metrics import times_of, token_steps
from rooflab.bench.load.trace import Request, Trace
from rooflab.bench.report.pictures.canvas import INK, LOST, PALE, READ_COLOUR, WRITTEN, new_figure, note, save
from rooflab.roofline.plot import with_own_settings

WAIT_COLOUR, STREAM_COLOUR = WRITTEN, READ_COLOUR
SPIKE_COLOURS = dict(zip(CAUSE_KINDS, (LOST, "#cc79a7", "#f0e442", INK), strict=True))
"""By cause of a long gap, its colour."""
SHOWN_REQUESTS = 40
"""The most requests that a waterfall shows."""
MAX_TOKEN_MARKS = 600
"""Tokens are marked if their median gap is at least the width divided by this; closer marks would hide the bar."""
Summary = Mapping[str, float]


@with_own_settings
def draw_rates(summaries: Sequence[tuple[float, Summary]], folder: Path, about: str, frontier: bool = False) -> Path:
    """Draws TTFT and ITL against the request rate of the load in requests per second, as `rates.png`.  With `frontier`,
    the x axis is the measured throughput, each point is labelled with its request rate, and the file is `frontier.png`.
    """
    figure, x_names = new_figure(9.6, 4.0), ("steady_output_tokens_per_s", "output_tokens_per_s")
    title = "Throughput and latency" if frontier else "Latency against the offered rate"
    figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left")
    xs = [next((row[name] for name in x_names if name in row), 0.0) if frontier else rate for rate, row in summaries]
    for axes, (name, title) in zip(
        figure.subplots(1, 2), (("ttft", "TTFT, from the scheduled arrival (ms)"), ("itl", "ITL (ms)")), strict=True
    ):
        _lines(axes, xs, [row for _, row in summaries], name)
        for i, ((rate, row), point_x) in enumerate(zip(summaries, xs, strict=True)):
            if frontier and (y := row.get(f"{name}_p50_ms")) is not None:
                offset = (-4, 6 if i % 2 else -12)  # below and above in turn, because points may nearly coincide
                axes.annotate(f"{rate:g}/s", (point_x, y), offset, textcoords="offset points", fontsize=8, color=INK)
        axes.set_title(title, fontsize=10, loc="left", weight="bold")
        axes.set_xlabel("output tokens/s" if frontier else "requests/s offered", fontsize=9)
    note(figure, [about])
    return save(figure, folder / ("frontier.png" if frontier else "rates.png"))


def _lines(axes: Any, xs: Sequence[float], summaries: Sequence[Summary], name: str) -> None:
    for quantile, colour, dashes in ((50, READ_COLOUR, "-"), (90, WRITTEN, "--"), (99, LOST, ":")):
        rate_points = [(point_x, row.get(f"{name}_p{quantile}_ms")) for point_x, row in zip(xs, summaries, strict=True)]
        points = [(point_x, y) for point_x, y in rate_points if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), dashes, color=colour, marker="o", markersize=4, label=f"p{quantile}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("{x:,g}")
    axes.tick_params(labelsize=8, which="both")
    axes.margins(x=0.09, y=0.15)
    axes.grid(axis="y", which="both", color=PALE, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8.5, frameon=False)


@with_own_settings
def draw_waterfall(trace: Trace, folder: Path, about: str, name: str = "waterfall") -> Path:
    """Draws a timeline of requests from the middle of the run: the waiting time and the tokens of each request."""
    requests = sorted(trace.requests, key=lambda request: request.scheduled_s)
    first_index = max(0, (len(requests) - SHOWN_REQUESTS) // 2)
    requests = requests[first_index : first_index + SHOWN_REQUESTS]
    rows = {request.index: row for row, request in enumerate(requests)}
    figure = new_figure(9.6, 1.9 + 0.17 * max(8, len(requests)))
    figure.suptitle("Requests: due, then token by token", fontsize=13, weight="bold", x=0.01, ha="left")
    axes = figure.subplots()
    start_s = min((request.scheduled_s for request in requests), default=0.0)
    spikes_in_rows = [spike for spike in spikes(trace) if spike.request in rows]
    run_duration_s = max((request.end_s or start_s for request in requests), default=start_s) - start_s
    gaps = [gap for request in requests if (answer_times := times_of(request)) for gap in answer_times.chunk_gap_ms]
    shows_token_marks = bool(gaps) and float(np.median(gaps)) / 1e3 * MAX_TOKEN_MARKS > run_duration_s
    for request in requests:
        _row(axes, rows[request.index], request, start_s, shows_token_marks)
    for spike in spikes_in_rows:
        row, bar_left_s, gap_s = rows[spike.request], spike.begin_s - start_s, spike.end_s - spike.begin_s
        axes.barh(row, gap_s, left=bar_left_s, height=0.7, color=SPIKE_COLOURS[spike.kind], linewidth=0)
        if spike.kind == "prefill" and gap_s > 0.025 * run_duration_s:  # room for the tokens
            axes.text(
                bar_left_s + gap_s / 2, row, spike.cause.split()[2], fontsize=6, ha="center", va="center", color="white"
            )
    legend_labels = (
        (WAIT_COLOUR, "waiting for the first token"),
        (STREAM_COLOUR, f"tokens{', white: each' if shows_token_marks else ''}"),
    )
    legend_patches = [Patch(color=colour, label=label) for colour, label in legend_labels]
    spike_kinds = [kind for kind in CAUSE_KINDS if any(spike.kind == kind for spike in spikes_in_rows)]
    legend_patches += [Patch(color=SPIKE_COLOURS[kind], label=f"long gap: {kind}") for kind in spike_kinds]
    axes.legend(handles=legend_patches, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_ylim(max(8, len(requests)) - 0.5, -0.5)
    axes.set_yticks(range(0, len(requests), 5), [str(requests[row].index) for row in range(0, len(requests), 5)])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("seconds from the first of these arrivals", fontsize=9)
    axes.set_ylabel("request", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    gap_note = "Long gaps: over 1.5 medians of their request; causes by the server's steps, prefills with their tokens."
    shown_text = f"{len(requests)} of {len(trace.requests)} requests. {gap_note if trace.steps is not None else ''}"
    note(figure, [shown_text, about])
    return save(figure, folder / f"{name}.png")


def _row(axes: Any, place: int, request: Request, zero: float, marks: bool) -> None:
    times = sorted(time_s for answer in token_steps(request)[0] for time_s, _ in answer)
    answer_end_s = request.end_s or request.sent_s
    first_token_s, last_token_s = (times[0], times[-1]) if times and not request.error else (answer_end_s, answer_end_s)
    bars = [(request.scheduled_s, first_token_s, WAIT_COLOUR), (first_token_s, last_token_s, STREAM_COLOUR)]
    for begin_s, end_s, colour in bars:
        axes.barh(place, end_s - begin_s, left=begin_s - zero, height=0.7, color=colour, linewidth=0)
    if request.error:
        axes.text(answer_end_s - zero, place, " failed", fontsize=7, va="center", color=LOST)
    elif marks:
        axes.vlines([time_s - zero for time_s in times], place - 0.35, place + 0.35, colors="white", linewidth=0.4)
