"""How much throughput does continuous batching give over static batches?"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.capacity import kv_blocks
from rooflab.bench.latency.clock import Settings, simulate
from rooflab.bench.latency.step_model import StepModel
from rooflab.bench.latency.study import Curve, Lab, Study, judged, spread
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.data import Data
from rooflab.bench.load.metrics import summarize
from rooflab.bench.load.run import Plan
from rooflab.engine.llm import LLM, SamplingParams

KINDS = ("static", "continuous")
INFINITE = Arrivals(float("inf"))


def run(lab: Lab) -> Study:
    """Output tokens a second of answers of very different lengths that are all there at once, with both kinds of batch.

    A static batch waits for its longest answer.  Predicted: our scheduler on a clock, with this engine's step times.
    """
    batch, count = lab.size(8, 4), lab.size(32, 8)
    data = Data(input_len=(8, 32), output_len=(1, lab.size(96, 12)))
    plan = Plan(arrivals=INFINITE, num_prompts=count, data=data)
    options = {"max_num_seqs": batch, "max_model_len": 256, "num_kv_blocks": 512, "prefix_caching": False}
    rows: list[dict[str, Any]] = []
    llm = lab.llm(**options)
    settings = Settings(512, max_num_seqs=batch)
    model = calibrated(llm, lab.size(128, 16))
    for static in (True, False):
        samples = []
        for _ in range(lab.size(3, 1)):
            llm.scheduler.continuous = not static
            samples.append(_tokens_per_s(llm, plan))
        middle, low, high = spread(samples)
        predicted = _throughput(model, plan, replace(settings, continuous_batching=not static))
        rows.append({"batching": "static" if static else "continuous", "tokens_per_s": middle, "low": low, "high": high,
                     "predicted": predicted, **_on_h100(lab, static)})  # fmt: skip
    gain, wanted = (rows[1][name] / rows[0][name] for name in ("tokens_per_s", "predicted"))
    far = rows[1]["h100"] / rows[0]["h100"]
    sizes = (8, 32, 128) if not lab.quick else (8,)
    return Study(
        name="batching",
        claim="Continuous batching gives 5 to 10 times the throughput of static batches",
        source="Orca (Yu et al., OSDI 2022) as it is often quoted",
        rows=rows,
        verdict=judged(gain, 5.0, 1.2),
        number=f"{gain:.2f} times here, {wanted:.2f} predicted; {far:.2f} on an H100 with ShareGPT's lengths and 128 "
        "sequences",
        curves=tuple(
            Curve(name, sizes, [float(_on_h100(lab, static, size)["h100"]) for size in sizes], 1)
            for name, static in (("continuous", False), ("static", True))
        ) + (
            Curve("measured", KINDS, [row["tokens_per_s"] for row in rows], low=[row["low"] for row in rows],
                  high=[row["high"] for row in rows]),
            Curve("measured, predicted", KINDS, [row["predicted"] for row in rows], dashed=True),
        ),
        far_x="sequences of a batch", y="output tokens/s",
        about=f"{lab.about(llm)}, {count} answers of 1 to {data.output_len[1]} tokens, {batch} at once",
    )  # fmt: skip


def _tokens_per_s(llm: LLM, plan: Plan) -> float:
    shots = [prompt for prompt, _ in zip(plan.data.prompts(plan.seed), range(plan.num_prompts), strict=False)]
    for one in shots:
        llm.add_request(list(one.content), SamplingParams(max_tokens=one.output_tokens, ignore_eos=True))  # type: ignore[arg-type]
    began = time.perf_counter()
    while llm.has_work:
        llm.step()
    return sum(one.output_tokens for one in shots) / (time.perf_counter() - began)


def _throughput(model: StepModel, plan: Plan, settings: Settings) -> float:
    return summarize(simulate(model, plan, settings))["output_tokens_per_s"]


def _on_h100(lab: Lab, static: bool, batch: int = 128) -> dict[str, float]:
    plan = Plan(arrivals=INFINITE, num_prompts=lab.size(1000, 40), data=Data("sharegpt"))
    settings = Settings(kv_blocks(lab.h100, Settings(0)), max_num_seqs=batch, continuous_batching=not static)
    return {"h100": float(np.round(_throughput(lab.h100, plan, settings), 1))}
