"""The engine's scheduler on a clock beside serving measurements that others published, on H100s.

    python results/serving_clock.py

The measurements are those of `results/published/end_to_end.csv`: a constant number of requests in flight, with the mean
time between tokens and the mean TTFT.  Their throughput is what follows from both.  It writes `serving_clock.md` there,
and its figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas as pd

from rooflab.bench.base.plain import markdown_table
from rooflab.bench.latency.capacity import kv_blocks
from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.load.data import Data
from rooflab.bench.load.metrics import times_of
from rooflab.bench.load.run import Plan
from rooflab.bench.load.trace import Trace
from rooflab.bench.report.pictures.figures import INK, LOST, READ, WIDTH_IN, new_figure, note, save
from rooflab.kernels._files import write_whole
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.plot import own_settings
from rooflab.roofline.published import FOLDER

TURNS = 3
"""Requests of a run, for each that is in flight."""
CLOSE = 0.2
SPREAD = 0.2
"""Of output lengths around the stated one, where requests shall not end together."""
GROUP = ["model", "gpus", "dtype", "engine"]
FIGURES = (("ttft_ms", "TTFT, mean (ms)"), ("itl_ms", "time between tokens, mean (ms)"), ("tokens_per_s", "tokens/s"))
DRAWN = (("llama-3.1-8b", 1), ("llama-3.1-70b", 2), ("llama-3.1-70b", 4), ("llama-3.1-70b", 8))
"""Models and GPUs of the figure."""


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of H100s with the published `tokens_per_s`, and the clock's figure for each, as `clock_itl_ms`.

    Requests of one length begin and end together on the clock, for ever; `apart_ttft_ms` is of lengths that are not
    quite equal, behind the first turn.  Of a server in use either may be the nearer, and the source does not say.
    """
    found, models = list[dict[str, Any]](), dict[tuple[Any, ...], KernelTimes]()
    asked: list[Any] = rows[rows.gpu == "h100-sxm"].to_dict("records")
    for row in asked:
        key = row["model"], row["gpu"], row["dtype"], row["gpus"]
        if key not in models:
            models[key] = KernelTimes(get_architecture(key[0]), get_device(key[1]), key[2], gpus=key[3])
        model = models[key]
        trace, apart = (_trace(model, row, spread) for spread in (0.0, SPREAD))
        ends = [chunk.time_s for request in trace.requests for chunk in request.chunks]
        steady = sum(end <= trace.last_arrival_s for end in ends) / trace.last_arrival_s
        times = [own for request in trace.requests if (own := times_of(request))]
        later = [own for request in apart.requests[row["requests"] :] if (own := times_of(request))]
        whole_ms = row["ttft_ms"] + row["itl_ms"] * (row["output"] - 1)
        found.append({
            **row, "clock_ttft_ms": mean(own.ttft_ms for own in times),
            "apart_ttft_ms": mean(own.ttft_ms for own in later),
            "clock_itl_ms": mean(own.tpot_ms for own in times if own.tpot_ms), "clock_tokens_per_s": steady,
            "tokens_per_s": 1e3 * row["requests"] * row["output"] / whole_ms,
        })  # fmt: skip
    return pd.DataFrame(found)


def _trace(model: KernelTimes, row: dict[str, Any], spread: float) -> Trace:
    count, output = row["requests"], row["output"]
    lengths = (row["prompt"],) * 2, (round((1 - spread) * output), round((1 + spread) * output))
    plan = Plan(concurrency=count, num_prompts=TURNS * count, data=Data("random", *lengths))
    return simulate(model, plan, ClockSettings(kv_blocks(model, ClockSettings(0))))


def page(rows: pd.DataFrame) -> str:
    """The comparison as Markdown."""
    lines = [
        "# The scheduler on a clock beside published serving measurements on H100s",
        "",
        "Nothing here was measured by Rooflab. Published: `end_to_end.csv`, from aiconfigurator-core 0.12.0"
        " (Apache-2.0): a constant number of requests in flight, mean time between tokens, mean TTFT; the throughput"
        " follows from these. Clock: our scheduler, with at most 8,192 tokens a step, and published times of vLLM"
        f" 0.24's kernels as step times; {TURNS} requests for each in flight, throughput until the last begins; no"
        " time of the host is in it. The source gives no median ITL. Made by `python results/serving_clock.py`.",
        "",
    ]
    columns = ("model", "GPUs:", "dtype", "engine", "rows:", "time between tokens, clock / published, median:",
               "within 20%:", "tokens/s, clock / published, median:", "within 20%:",
               "TTFT within 20% of apart to together:")  # fmt: skip
    table = []
    for key, own in rows.groupby(GROUP):
        cells: list[Any] = [*key, len(own)]
        for name in ("itl_ms", "tokens_per_s"):
            ratios = own[f"clock_{name}"] / own[name]
            cells += [f"{median(ratios):.2f}", f"{((ratios - 1).abs() <= CLOSE).sum()} of {len(own)}"]
        table.append([*cells, f"{_between(own)} of {len(own)}"])
    return "\n".join([*lines, *markdown_table(columns, table), "", "![](serving_clock.png)"]) + "\n"


def _between(rows: pd.DataFrame) -> int:
    low, high = (rows[[f"{name}_ttft_ms" for name in ("apart", "clock")]].agg(end, axis=1) for end in ("min", "max"))
    return int(((rows.ttft_ms >= (1 - CLOSE) * low) & (rows.ttft_ms <= (1 + CLOSE) * high)).sum())


@own_settings
def draw(rows: pd.DataFrame, folder: Path) -> Path:
    """Writes the curves of the clock, with what was published as points, and returns the figure's path."""
    across = 2  # models beside each other: four would be too small on a phone
    figure = new_figure(1.2 * WIDTH_IN, 16.0)
    figure.suptitle(
        "Llama-3.1 on H100s: our scheduler on a clock (lines),\nand servers that others measured (points)",
        fontsize=11, weight="bold", x=0.01, ha="left",
    )  # fmt: skip
    panels = figure.subplots(len(FIGURES) * len(DRAWN) // across, across)
    for place, (model, gpus) in enumerate(DRAWN):
        column, top = place % across, place // across * len(FIGURES)
        grid = panels[top : top + len(FIGURES)]
        own = rows[(rows.model == model) & (rows.gpus == gpus)]
        first = own.iloc[0]
        lengths = sorted(set(zip(own.prompt, own.output, strict=True)))
        for (name, label), axes in zip(FIGURES, grid[:, column], strict=True):
            # Of nine pairs of lengths the first, middle and last; the errors are of all.
            for colour, (prompt, output) in zip((READ, LOST, INK), lengths[:: max(1, len(lengths) // 2)], strict=False):
                part = own[(own.prompt == prompt) & (own.output == output)]
                axes.plot(part.requests, part[f"clock_{name}"], color=colour, label=f"{prompt} + {output} tokens")
                axes.plot(part.requests, part[name], "o", color=colour, markersize=5)
                if name == "ttft_ms":
                    axes.fill_between(
                        part.requests, part.apart_ttft_ms, part[f"clock_{name}"], color=colour, alpha=0.12
                    )
            off = own[f"clock_{name}"] / own[name] - 1
            text = f"clock {off.median():+.0%}; within 20% in {(off.abs() <= CLOSE).sum()} of {len(off)}"
            text = f"in 20% of the range in {_between(own)} of {len(own)}" if name == "ttft_ms" else text
            axes.set_title(text, fontsize=9, loc="left")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(set(own.requests)), sorted(set(own.requests)))
            axes.set_yscale("log" if name == "ttft_ms" else "linear")
            axes.set_ylim(bottom=None if name == "ttft_ms" else 0)
            axes.set_ylabel("" if column else label, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        head = f"{model}, {gpus} x H100 SXM\n{first['dtype']}; measured:\n{first['engine']}"
        grid[0, column].annotate(head, (0, 1.13), xycoords="axes fraction", fontsize=9, weight="bold")
        grid[-1, column].legend(fontsize=8, frameon=False, loc="upper left")
        grid[-1, column].set_xlabel("requests in flight", fontsize=9)
    note(figure, [
        "Lines: step times are the sums of published times of vLLM 0.24's kernels and of all-reduce; no time of the "
        "host. Above a panel: the median error over all rows. Bands: TTFT from requests that begin apart to such that "
        "begin together. Points: measurements in aiconfigurator-core 0.12.0; their tokens/s follow from both times. "
        "Nothing was measured by Rooflab.",
    ])  # fmt: skip
    return save(figure, folder / "serving_clock.png")


def main() -> None:
    """The script."""
    argparse.ArgumentParser(description="The scheduler on a clock beside published serving measurements.").parse_args()
    rows = compared(pd.read_csv(FOLDER / "end_to_end.csv"))
    text = page(rows)
    draw(rows, FOLDER)
    write_whole(FOLDER / "serving_clock.md", text)
    print(text)


if __name__ == "__main__":
    main()
