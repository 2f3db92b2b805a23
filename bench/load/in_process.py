"""Measures the engine without a server, with the metrics of a load test, to find the cost of the server."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooflab.bench.core import RunWriter
from rooflab.bench.engine.runs import engine_record, run_batch, warm_up
from rooflab.engine.llm import LLM, SamplingParams


def measure(options: Mapping[str, Any], sizes: Mapping[str, int], out: Path | None) -> dict[str, Any]:
    """Runs a batch of requests that arrive together.  Returns its results, and writes them to a given folder `out`.

    `sizes` has three values in this order: tokens per prompt, tokens per answer, number of requests.  Its keys name
    them in error messages.  Raises `ValueError` on a number below 1, or if the model cannot serve these sizes."""
    for option_name, option_value in sizes.items():
        if option_value < 1:
            raise ValueError(f"{option_name}: expected at least 1, got {option_value}")
    input_len, output_len, num_requests = sizes.values()
    llm = LLM(**{**options, "max_num_seqs": num_requests})
    # The measured prompts differ from those of the warm-up, because the prefix cache may hold the latter.
    warm_up(llm, input_len)
    random_generator = random.Random(options["seed"] + 1)
    prompts = [random_generator.choices(range(llm.arch.vocab_size), k=input_len) for _ in range(num_requests)]
    batch_run = run_batch(llm, prompts, SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True))
    if out:
        record_writer = RunWriter(out)
        record_writer.write(engine_record(llm, batch_run, "latency", sizes, record_writer.run_id))
    engine_settings = {"model": llm.arch.name, "device": llm.device.type, "dtype": llm.dtype_name}
    return {**engine_settings, "status": batch_run.status, "reason": batch_run.reason, **asdict(batch_run.summary)}
