"""How much throughput does continuous batching give over static batches?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapreplace
from itertools import islice
from typing import Any

from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.ledger import seconds_of
from rooflab.bench.latency.study import Lab, Study, at_least, spread
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.data import Data, Prompt
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import summarize
from rooflab.engine.llm import LLM, SamplingParams


class OneLong(Data):
    """Prompts whose answers are one token, but for one in each batch: static batches lose most with these."""

    batch = 16

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Prompts without end."""
        draw, (short, long), place = random.Random(seed), self.output_len, 0
        for number, prompt in enumerate(super().prompts(seed)):
            place = draw.randrange(self.batch) if number % self.batch == 0 else place
            yield replace(prompt, output_tokens=long if number % self.batch == place else short)


def run(lab: Lab) -> Study:
    """Measures output tokens a second with both kinds of batch; all requests are there at once, and their answers have
    very different lengths.

    A static batch waits for its longest answer.  The prediction is our scheduler on a clock, with this engine's step
    times.  The lengths alone, each step as long as another, allow more than the claim wants.
    """
    batch, count = OneLong.batch, lab.size(12, 2) * OneLong.batch
    data = OneLong(input_len=(4, 8), output_len=(1, lab.size(32, 8)))
    plan = Plan(arrivals=Arrivals(float("inf")), num_prompts=count, data=data)
    prompts = list(islice(data.prompts(plan.seed), count))
    llm = lab.llm(max_num_seqs=batch, max_model_len=256, num_kv_blocks=512, prefix_caching=False)
    model = calibrated(llm, lab.size(128, 16))
    samples: dict[str, list[float]] = {"static": [], "continuous": []}
    for _ in range(lab.size(3, 1)):
        for kind, rates in samples.items():
            llm.scheduler.continuous = kind == "continuous"
            rates.append(_tokens_per_s(llm, prompts))
    rows: list[dict[str, Any]] = []
    for kind, rates in samples.items():
        middle, low, high = spread(rates)
        settings = ClockSettings(512, max_num_seqs=batch, continuous_batching=kind == "continuous")
        predicted = summarize(simulate(model, plan, settings))["output_tokens_per_s"]
        rows.append({"batching": kind, "tokens_per_s": middle, "low": low, "high": high, "predicted": predicted})
    gain, expected = (rows[1][name] / rows[0][name] for name in ("tokens_per_s", "predicted"))
    allowed = _allowed([prompt.output_tokens for prompt in prompts], batch)
    return Study(
        claim="Continuous batching gives 5 to 10 times the throughput of static batches",
        source="Orca (Yu et al., OSDI 2022) as it is often quoted",
        rows=rows,
        verdict=at_least(gain, 5.0, 1.2),
        number=f"{gain:.2f} times here, {expected:.2f} predicted; the lengths alone allow {allowed:.2f}",
        about=f"{lab.about(llm)}, {count} answers of one token or, one in {batch}, of {data.output_len[1]}",
        x="batching",
        curves={"measured": "tokens_per_s", "measured, predicted": "predicted"},
        x_label="",
        y_label="output tokens/s",
        band=("low", "high"),
    )


def _allowed(lengths: list[int], batch: int) -> float:
    """Steps of static batches over steps of continuous ones, with a token a step for each sequence."""
    ends = [0] * batch
    for length in lengths:
        heapreplace(ends, ends[0] + length)
    return sum(max(lengths[at : at + batch]) for at in range(0, len(lengths), batch)) / max(ends)


def _tokens_per_s(llm: LLM, prompts: list[Prompt]) -> float:
    for prompt in prompts:
        params = SamplingParams(max_tokens=prompt.output_tokens, ignore_eos=True)
        llm.add_request(list(prompt.content), params)  # type: ignore[arg-type]
    seconds = 0.0
    while llm.has_work:
        seconds += seconds_of(llm.step)
    return sum(prompt.output_tokens for prompt in prompts) / seconds
