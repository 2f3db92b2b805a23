"""Measures how much throughput continuous batching gains over static batching."""

from __future__ import annotations

import random
from heapq import heapreplace
from typing import Any

from rooflab.bench.latency.ledger import draw_prompts
from rooflab.bench.latency.study import Lab, Study, at_least, run_all_s, spread
from rooflab.engine.llm import LLM, SamplingParams

BATCH = 16


def run(lab: Lab) -> Study:
    """Measures output tokens per second with continuous and with static batching.  All requests arrive at once.

    In each batch, one answer is long and the others have one token.  So a static batch waits for its longest answer.
    The prediction assumes equally long steps."""
    prompt_count, longest_answer = lab.size(12, 2) * BATCH, lab.size(32, 8)
    generator, answer_lengths = random.Random(0), [1] * prompt_count
    for batch_start in range(0, prompt_count, BATCH):
        answer_lengths[batch_start + generator.randrange(BATCH)] = longest_answer
    llm = lab.llm(max_num_seqs=BATCH, max_model_len=256, num_kv_blocks=512, prefix_caching=False)
    prompts = draw_prompts(llm, prompt_count, 6, seed=0)
    _tokens_per_s(llm, prompts[:BATCH], answer_lengths[:BATCH])  # the first steps allocate
    rate_samples: dict[str, list[float]] = {"static": [], "continuous": []}
    for _ in range(lab.size(3, 1)):
        for batching_kind, token_rates in rate_samples.items():
            llm.scheduler.continuous = batching_kind == "continuous"
            token_rates.append(_tokens_per_s(llm, prompts, answer_lengths))
    rate_rows: list[dict[str, Any]] = []
    for batching_kind, token_rates in rate_samples.items():
        median, low, high = spread(token_rates)
        predicted_rate = rate_rows[0]["tokens_per_s"] * _allowed(answer_lengths) if rate_rows else median
        rate_rows.append(
            {"batching": batching_kind, "tokens_per_s": median, "low": low, "high": high, "predicted": predicted_rate}
        )
    throughput_gain, allowed_gain = (rate_rows[1][name] / rate_rows[0][name] for name in ("tokens_per_s", "predicted"))
    return Study(
        claim="Continuous batching gives 5 to 10 times the throughput of static batches",
        source="Orca (Yu et al., OSDI 2022) as it is often quoted",
        rows=rate_rows,
        verdict=at_least(throughput_gain, 5.0, 1.2),
        number=f"{throughput_gain:.2f} times here; the lengths alone allow {allowed_gain:.2f}",
        about=f"{lab.about(llm)}, {prompt_count} answers of one token or, one in {BATCH}, of {longest_answer}",
        x="batching",
        curves={"throughput": "tokens_per_s", "throughput, predicted": "predicted"},
        x_label="",
        y_label="output tokens/s",
        band=("low", "high"),
    )


def _allowed(lengths: list[int]) -> float:
    """Returns the largest speed-up of continuous over static batching: the ratio of steps for the answer lengths."""
    end_step_by_slot = [0] * BATCH
    for answer_length in lengths:
        heapreplace(end_step_by_slot, end_step_by_slot[0] + answer_length)
    return sum(max(lengths[start : start + BATCH]) for start in range(0, len(lengths), BATCH)) / max(end_step_by_slot)


def _tokens_per_s(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    for prompt, answer_length in zip(prompts, lengths, strict=True):
        llm.add_request(prompt, SamplingParams(max_tokens=answer_length, ignore_eos=True))
    return sum(lengths) / run_all_s(llm)
