"""The engine's scheduler on a clock beside serving measurements that others published, on H100s.

    python -m rooflab.bench.latency.against_published

The measurements are those of `results/published/end_to_end.csv`: a constant number of requests in flight, with the mean
time between tokens and the mean TTFT.  Their throughput is what follows from both.  It writes `serving_clock.md` there.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import pandas as pd

from rooflab.bench.latency.capacity import kv_blocks
from rooflab.bench.latency.clock import Settings, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.load.data import Data
from rooflab.bench.load.metrics import times_of
from rooflab.bench.load.run import Plan
from rooflab.bench.records.files import write_whole
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.published import FOLDER

TURNS = 3
"""Requests of a run, for each that is in flight."""
CLOSE = 0.2
GROUP = ["model", "gpus", "dtype", "engine"]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of H100s with the clock's `clock_itl_ms` and `clock_tokens_per_s`, and the published `tokens_per_s`."""
    found, models = list[dict[str, Any]](), dict[tuple[Any, ...], KernelTimes]()
    asked: list[Any] = rows[rows.gpu == "h100-sxm"].to_dict("records")
    for row in asked:
        key = row["model"], row["gpu"], row["dtype"], row["gpus"]
        if key not in models:
            models[key] = KernelTimes(get_architecture(key[0]), get_device(key[1]), key[2], gpus=key[3])
        model = models[key]
        lengths = (row["prompt"],) * 2, (row["output"],) * 2
        plan = Plan(concurrency=row["requests"], num_prompts=TURNS * row["requests"], data=Data("random", *lengths))
        trace = simulate(model, plan, Settings(kv_blocks(model, Settings(0))))
        ends = [chunk.time_s for request in trace.requests for chunk in request.chunks]
        steady = sum(end <= trace.last_arrival_s for end in ends) / trace.last_arrival_s
        tpot = mean(own.tpot_ms for request in trace.requests if (own := times_of(request)) and own.tpot_ms)
        whole_ms = row["ttft_ms"] + row["itl_ms"] * (row["output"] - 1)
        found.append({
            **row, "clock_itl_ms": tpot, "clock_tokens_per_s": steady,
            "tokens_per_s": 1e3 * row["requests"] * row["output"] / whole_ms,
        })  # fmt: skip
    return pd.DataFrame(found)


def page(rows: pd.DataFrame) -> str:
    """The comparison as Markdown."""
    lines = [
        "# The scheduler on a clock beside published serving measurements on H100s",
        "",
        "Nothing here was measured by Rooflab. Published: `end_to_end.csv`, from aiconfigurator-core 0.12.0"
        " (Apache-2.0): a constant number of requests in flight, mean time between tokens, mean TTFT; the throughput"
        " follows from these. Clock: our scheduler, with at most 8,192 tokens a step, and published times of vLLM"
        f" 0.24's kernels as step times; {TURNS} requests for each in flight, throughput until the last begins; no"
        " time of the host is in it. The source gives no median ITL. Made by `python -m"
        " rooflab.bench.latency.against_published`.",
        "",
        "| model | GPUs | dtype | engine | rows | time between tokens, clock / published, median | within 20% |"
        " tokens/s, clock / published, median | within 20% |",
        "|---|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for key, own in rows.groupby(GROUP):
        cells: list[Any] = [*key, len(own)]
        for ours, theirs in (("clock_itl_ms", "itl_ms"), ("clock_tokens_per_s", "tokens_per_s")):
            ratios = own[ours] / own[theirs]
            cells += [f"{median(ratios):.2f}", f"{((ratios - 1).abs() <= CLOSE).sum()} of {len(own)}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The script."""
    text = page(compared(pd.read_csv(FOLDER / "end_to_end.csv")))
    write_whole(FOLDER / "serving_clock.md", text)
    print(text)


if __name__ == "__main__":
    main()
