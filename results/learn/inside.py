"""Records one run of SmolLM2-135M: its tokens, times and probabilities, and what its layers compute."""

from __future__ import annotations

import math

import torch

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core import why_noisy
from rooflab.bench.latency.ledger import measured
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.kernels._waiting import run_times, waiting_since

QUESTION = "What is the capital of France?"
CHAT = [{"role": "user", "content": QUESTION}]
RUNS = 5
"""The quickest of these runs is kept: other programs on the machine only make a run slower."""


def files() -> dict[str, JsonObject]:
    """Returns the contents of the data files by their names."""
    llm = LLM("smollm2-135m", max_model_len=512, max_num_seqs=4, prefix_caching=False)
    return {"run.json": run_of(llm)}


def run_of(llm: LLM) -> JsonObject:
    """Returns the tokens, times (ms) and likeliest tokens of the run, and the ops of one prefill and decode step."""
    before = run_times()
    outputs = [llm.generate([CHAT])[0] for _ in range(RUNS + 1)][1:]  # the first run also warms up
    output = min(outputs, key=lambda one: one.timeline.e2e_ms)
    steps, text_of = llm.generate([CHAT], SamplingParams(logprobs=5))[0].outputs[0], lambda i: llm.tokenizer.named(i)[0]
    noise = why_noisy([], waiting_since(before))
    assert steps.token_ids == output["token_ids"], "a greedy answer is always the same"
    times = [output.timeline.ttft_ms, *output.timeline.itl_ms.tolist()]
    ledgers = {kind: measured(llm, kind, 1, len(output.prompt_token_ids)) for kind in ("prefill", "decode")}
    return {
        "model": llm.arch.name,
        "dtype": llm.dtype_name,
        "device": llm.device.type,
        "block_size": llm.scheduler.blocks.block_size,
        "question": QUESTION,
        "prompt": [[token, text_of(token)] for token in output.prompt_token_ids],
        "answer": [[token, text_of(token)] for token in output["token_ids"]],
        "text": output["text"],
        "finish_reason": output["finish_reason"],
        "steps": [
            {"ms": ms, "token": token, "top": [[i, text_of(i), math.exp(p)] for i, p in list(top.items())[:5]]}
            for ms, token, top in zip(times, steps.token_ids, steps.logprobs or [], strict=True)
        ],
        "runs": RUNS,
        "noise": noise,
        "ttft_ms": times[0],
        "itl_ms": sorted(times[1:])[len(times[1:]) // 2],
        "e2e_ms": output.timeline.e2e_ms,
        "ledger": {
            kind: {
                "context": ledger.context,
                "step_ms": ledger.step_ms,
                "host_ms": ledger.host_ms,
                "noise": ledger.noise,
                "head": ["op", "site", "kernel", "calls", "ms", "MB"],
                "rows": [
                    [row[key] for key in ("op", "site", "kernel", "calls", "ms", "MB")]
                    for row in ledger.table()
                    if "kernel" in row
                ],
            }
            for kind, ledger in ledgers.items()
        },
    }
