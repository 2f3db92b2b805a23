"""How much throughput does continuous batching give over static batches?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapreplace
from itertools import islice
from typing import Any

from rooflab.bench.base.system_time import time
from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.capacity import kv_blocks
from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import StepModel
from rooflab.bench.latency.study import Curve, Lab, Study, at_least, spread
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.data import Data, Prompt
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import summarize
from rooflab.engine.llm import LLM, SamplingParams

KINDS = ("static", "continuous")
INFINITE = Arrivals(float("inf"))


class OneLong(Data):
    """Prompts whose answers are one token, but for one in each batch: static batches lose most with these."""

    batch = 16

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Prompts without end."""
        draw, (short, long), place = random.Random(seed), self.output_len, 0
        for number, one in enumerate(super().prompts(seed)):
            place = draw.randrange(self.batch) if number % self.batch == 0 else place
            yield replace(one, output_tokens=long if number % self.batch == place else short)


def run(lab: Lab) -> Study:
    """Output tokens a second of answers of very different lengths that are all there at once, with both kinds of batch.

    A static batch waits for its longest answer.  Predicted: our scheduler on a clock, with this engine's step times.
    The lengths alone, each step as long as another, allow more than the claim wants.
    """
    batch, count = OneLong.batch, lab.size(12, 2) * OneLong.batch
    data = OneLong(input_len=(4, 8), output_len=(1, lab.size(32, 8)))
    plan = Plan(arrivals=INFINITE, num_prompts=count, data=data)
    options = {"max_num_seqs": batch, "max_model_len": 256, "num_kv_blocks": 512, "prefix_caching": False}
    rows: list[dict[str, Any]] = []
    llm = lab.llm(**options)
    settings = ClockSettings(512, max_num_seqs=batch)
    model = calibrated(llm, lab.size(128, 16))
    sizes = (8, 32, 128) if not lab.quick else (8,)
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(lab.size(3, 1)):
        for kind in KINDS:
            llm.scheduler.continuous = kind == "continuous"
            samples[kind].append(_tokens_per_s(llm, plan))
    far = {kind: [_on_h100(lab, kind, size) for size in sizes] for kind in KINDS}
    for kind in KINDS:
        middle, low, high = spread(samples[kind])
        predicted = _throughput(model, plan, replace(settings, continuous_batching=kind == "continuous"))
        rows.append({"batching": kind, "tokens_per_s": middle, "low": low, "high": high, "predicted": predicted,
                     "h100": far[kind][-1]})  # fmt: skip
    gain, wanted, on_h100 = (rows[1][name] / rows[0][name] for name in ("tokens_per_s", "predicted", "h100"))
    return Study(
        claim="Continuous batching gives 5 to 10 times the throughput of static batches",
        source="Orca (Yu et al., OSDI 2022) as it is often quoted",
        rows=rows,
        verdict=at_least(gain, 5.0, 1.2),
        number=f"{gain:.2f} times here, {wanted:.2f} predicted; the lengths alone allow {_allowed(plan, batch):.2f}; "
        f"by arithmetic {on_h100:.2f} on an H100 with ShareGPT's lengths and {sizes[-1]} sequences",
        curves=tuple(Curve(kind, sizes, far[kind], 1) for kind in reversed(KINDS))
        + (
            Curve(
                "measured",
                KINDS,
                [row["tokens_per_s"] for row in rows],
                low=[row["low"] for row in rows],
                high=[row["high"] for row in rows],
            ),
            Curve("measured, predicted", KINDS, [row["predicted"] for row in rows]),
        ),
        far_x="sequences of a batch",
        y="output tokens/s",
        about=f"{lab.about(llm)}, {count} answers of one token or, one in {batch}, of {data.output_len[1]}",
    )


def _shots(plan: Plan) -> list[Prompt]:
    return list(islice(plan.data.prompts(plan.seed), plan.num_prompts))


def _allowed(plan: Plan, batch: int) -> float:
    """Steps of static batches over steps of continuous ones, with a token a step for each sequence."""
    lengths = [one.output_tokens for one in _shots(plan)]
    ends = [0] * batch
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return sum(max(lengths[at : at + batch]) for at in range(0, len(lengths), batch)) / max(ends)


def _tokens_per_s(llm: LLM, plan: Plan) -> float:
    shots = _shots(plan)
    for one in shots:
        llm.add_request(list(one.content), SamplingParams(max_tokens=one.output_tokens, ignore_eos=True))  # type: ignore[arg-type]
    began = time.perf_counter()
    while llm.has_work:
        llm.step()
    return sum(one.output_tokens for one in shots) / (time.perf_counter() - began)


def _throughput(model: StepModel, plan: Plan, settings: ClockSettings) -> float:
    return summarize(simulate(model, plan, settings))["output_tokens_per_s"]


def _on_h100(lab: Lab, kind: str, batch: int) -> float:
    plan = Plan(arrivals=INFINITE, num_prompts=lab.size(1000, 40), data=Data("sharegpt"))
    settings = ClockSettings(
        kv_blocks(lab.h100, ClockSettings(0)), max_num_seqs=batch, continuous_batching=kind == "continuous"
    )
    return _throughput(lab.h100, plan, settings)
