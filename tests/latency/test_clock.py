"""The engine's scheduler on a simulated clock: the same steps as the engine's, with times from its models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tiny_model import tiny_llm

from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import KernelTimes, StepWork, fitted
from rooflab.bench.load.data import Data
from rooflab.bench.load.load_run import Plan
from rooflab.engine.llm import SamplingParams
from rooflab.engine.scheduler import pairs_of
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import get_device
from rooflab.roofline.step_times import step_time

LLAMA, H100 = get_architecture("llama-3.1-8b"), get_device("h100-sxm")


@dataclass
class Simple:
    """A step takes a second, and a tenth for each token of prompts; it remembers the steps."""

    basis = "made up"

    def __init__(self) -> None:
        self.seen: list[StepWork] = []

    def seconds(self, work: StepWork) -> float:
        self.seen.append(work)
        return 1.0 + 0.1 * work.prompt_tokens


TEN = Data(input_len=(10, 10), output_len=(3, 3))


def plan(**given: Any) -> Plan:
    """Prompts of 10 tokens, answers of 3."""
    return Plan(**{"data": TEN, "num_prompts": 2, **given})


class Even(Plan):
    """A load whose requests arrive two seconds apart."""

    def offsets(self) -> list[float]:
        return [2.0 * index for index in range(self.num_prompts)]


def test_two_requests_by_hand() -> None:
    """The second comes in the first's second step, and its prompt runs beside the first's other tokens."""
    model = Simple()
    settings = ClockSettings(16, max_num_seqs=4, max_num_batched_tokens=8)
    trace = simulate(model, Even(data=TEN, num_prompts=2, rate=0.5), settings, delay_s=0.25)
    assert [(work.decodes, work.keys, work.chunks) for work in model.seen] == [
        (0, 0, ((0, 8),)),
        (0, 0, ((8, 10),)),
        (1, 11, ((0, 7),)),
        (1, 12, ((7, 10),)),
        (1, 11, ()),
        (1, 12, ()),
    ]
    ends = np.cumsum([1.8, 1.2, 1.7, 1.3, 1.0, 1.0])
    times = [[chunk.time_s for chunk in request.chunks] for request in trace.requests]
    assert times[0] == pytest.approx(ends[1:4] + 0.25) and times[1] == pytest.approx(ends[3:] + 0.25)
    assert [request.scheduled_s for request in trace.requests] == [0.0, 2.0]


@pytest.mark.timeout(60)  # a sequence that does not leave runs for ever
@pytest.mark.parametrize("batched", [16, 512])
def test_the_clock_takes_the_steps_that_the_engine_takes(tmp_path: Any, batched: int) -> None:
    lengths = [(5, 19), (40, 14), (17, 32), (3, 3), (33, 17), (21, 25)]
    llm = tiny_llm(tmp_path, num_kv_blocks=6, max_num_seqs=4, max_num_batched_tokens=batched, prefix_caching=False)
    for prompt, answer in lengths:
        llm.add_request([1] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), arrival_s=0.0)
    steps, preempted = [], 0
    while llm.has_work:
        llm.step()
        step = llm.core.last
        preempted += len(step.preempted)
        keys = int(llm.runner.batch.seq_lens[: step.num_decodes].sum())
        steps.append((step.num_decodes, keys, tuple((chunk.start, chunk.end) for chunk in step.chunks)))

    class Given(Data):
        def prompts(self, seed: int) -> Any:
            for prompt, answer in lengths:
                yield replace(next(Data().prompts(seed)), content=[1] * prompt, tokens=prompt, output_tokens=answer)

    model = Simple()
    whole = Plan(rate=math.inf, num_prompts=len(lengths), data=Given())
    simulate(model, whole, ClockSettings(6, llm.scheduler.blocks.block_size, 4, batched))
    assert [(work.decodes, work.keys, work.chunks) for work in model.seen] == steps
    assert preempted > 0


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    model = Simple()
    trace = simulate(model, plan(concurrency=3, num_prompts=9), ClockSettings(64))
    assert max(work.decodes + len(work.chunks) for work in model.seen) == 3
    assert [request.output_tokens for request in trace.requests] == [3] * 9
    with pytest.raises(ValueError, match="plan: expected token ids"):
        simulate(model, plan(data=Data(ids=None)), ClockSettings(64))


def test_a_step_of_one_kind_takes_what_the_published_times_sum_to() -> None:
    model, decodes = KernelTimes(LLAMA, H100), StepWork(16, 16 * 2048, (), 16)
    decode, prefill = step_time(LLAMA, H100, "decode", 16, 2048), step_time(LLAMA, H100, "prefill", 1, 2048)
    assert decode is not None and prefill is not None and "published" in model.basis
    assert 1e3 * model.seconds(decodes) == pytest.approx(decode.ms, rel=0.005)
    assert 1e3 * model.seconds(StepWork(0, 0, ((0, 2048),), 1)) == pytest.approx(prefill.ms, rel=0.005)
    halves = [model.seconds(StepWork(0, 0, (part,), drawn)) for part, drawn in (((0, 1024), 0), ((1024, 2048), 1))]
    assert 1e3 * sum(halves) == pytest.approx(prefill.ms, rel=0.15)
    mixed = model.seconds(StepWork(16, 16 * 2048, ((0, 2048),), 17))
    assert max(decode.ms, prefill.ms) < 1e3 * mixed < decode.ms + prefill.ms, "the weights are read once"
    assert KernelTimes(LLAMA, H100, bounds=True).seconds(decodes) < 1e-3 * decode.ms


def test_measured_steps_are_fitted_and_found_again() -> None:
    random = np.random.default_rng(0)
    rows, chunks, at = [], [], 0.0
    for number in range(400):
        decodes, start, prompt = (int(random.integers(low, high)) for low, high in ((1, 40), (0, 200), (0, 300)))
        prompt += 20_000 * (number > 350)
        keys, pairs = decodes * 150, pairs_of(start, start + prompt)
        seconds = 2e-3 + 1e-4 * (decodes + prompt + max(0, decodes + prompt - 8192)) + 1e-7 * keys + 2e-8 * pairs
        row = {"num_decodes": decodes, "decode_keys": keys, "prompt_tokens": prompt, "prompt_pairs": pairs}
        rows.append({**row, "tokens": decodes, "begin_s": at, "end_s": at + seconds, "running": decodes})
        chunks.append((prompt, start))
        at += seconds + 1e-4
    model = fitted(rows)
    assert model.gap_s == pytest.approx(1e-4)
    for row, (prompt, start) in list(zip(rows, chunks, strict=True))[::40]:
        work = StepWork(row["num_decodes"], row["decode_keys"], ((start, start + prompt),), row["tokens"])
        assert model.seconds(work) == pytest.approx(row["end_s"] - row["begin_s"] + 1e-4, rel=2e-3)
    work = StepWork(8, 1200, ((50, 250),), 9)
    wanted = 2e-3 + 1e-4 * 208 + 1e-7 * 1200 + 2e-8 * work.pairs + 1e-4
    assert model.seconds(work) == pytest.approx(wanted, rel=0.02)
    with pytest.raises(ValueError, match="steps: expected at least 50"):
        fitted(rows[:10])
    # Behind the last knot a token has a price of its own.
    wanted = 2.1e-3 + 2.8192 + 2e-8 * pairs_of(0, 18_192)
    assert model.seconds(StepWork(0, 0, ((0, 18_192),))) == pytest.approx(wanted, rel=0.02)


def test_pages_fill_what_weights_and_activations_leave() -> None:
    one, two = (KernelTimes(LLAMA, H100, gpus=gpus) for gpus in (1, 2))
    pages = ClockSettings(1).fitting(one).num_kv_blocks
    assert pages * 16 == pytest.approx((72e9 - 16.06e9 - 0.97e9) / 131_072, rel=0.002)
    assert ClockSettings(1).fitting(two).num_kv_blocks > 2 * pages, "each GPU has half of the weights"
    with pytest.raises(ValueError, match="gpus: expected room for the weights of llama-3.1-70b, got 1"):
        ClockSettings(1).fitting(replace(one, arch=get_architecture("llama-3.1-70b")))


@pytest.mark.more
def test_the_commands(rooflab: Any, tmp_path: Any) -> None:
    asked = ("llama-3.1-8b", "--sweep", "5,20", "--num-prompts", "60", "--input-len", "256", "--output-len", "16")
    status, out, _ = rooflab("simulate", *asked, "--out", tmp_path, "--json")
    found = json.loads(out)
    assert status == 0 and [row["rate"] for row in found["rows"]] == ["5", "20"]
    assert found["rows"][0]["ttft_p50_ms"] < found["rows"][1]["ttft_p50_ms"] and (tmp_path / "frontier.png").is_file()
    (trace,) = tmp_path.glob("*-5.ndjson")
    status, out, _ = rooflab("simulate", *asked[:1], "--rate", "5", *asked[3:], "--against", trace, "--json")
    assert all(row["off_%"] == 0 for row in json.loads(out)["compared"]) and status == 0
    status, _, err = rooflab("simulate", "--steps", trace)
    assert status == 2 and "steps: expected at least 50" in err
