"""The times of an engine's own steps, in this process, fitted to a model of steps."""

from __future__ import annotations

import random
from typing import Any

from rooflab.bench.base.system_time import time
from rooflab.bench.latency.step_model import MeasuredSteps, fitted
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.scheduler import pairs_of


def calibrated(llm: LLM, longest: int = 256, seed: int = 7) -> MeasuredSteps:
    """The engine's step times, fitted to a run of requests of many lengths that come one after another."""
    draw = random.Random(seed)
    vocab = range(llm.arch.vocab_size)
    # Lengths up to the longest, for between two knots without a step the fit knows nothing.
    waiting = [(max(4, longest * place // 16), draw.randint(4, 32)) for place in range(16, 0, -1)]
    rows: list[dict[str, Any]] = []
    while waiting or llm.has_work:
        if waiting and len(rows) % 3 == 0:
            prompt, answer = waiting.pop()
            params = SamplingParams(max_tokens=answer, ignore_eos=True)
            llm.add_request(draw.choices(vocab, k=prompt), params)
        rows.append(_step(llm))
    return fitted(rows)


def _step(llm: LLM) -> dict[str, Any]:
    """Runs a step, and tells it as `GET /steps` does."""
    began = time.perf_counter()
    got = llm.step()
    ended, last = time.perf_counter(), llm.core.last
    chunks, decodes = (last.chunks, last.num_decodes) if last else ([], 0)
    return {
        "num_decodes": decodes,
        "decode_keys": int(llm.runner.batch.seq_lens[:decodes].sum()),
        "prompt_tokens": sum(chunk.end - chunk.start for chunk in chunks),
        "prompt_pairs": sum(pairs_of(chunk.start, chunk.end) for chunk in chunks),
        "tokens": len(got),
        "begin_s": began,
        "end_s": ended,
        "running": len(llm.scheduler.running),
    }
