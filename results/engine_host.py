"""Times the engine's host work in a decode step, without a model: scheduling, block tables, batch tensors, stop checks.

    python results/engine_host.py --sequences 256 --context 1024

A stand-in replaces the model and returns logits at no cost, so the time covers all other work of a step.  With 256
sequences of context 1024 and pages of 16 tokens, one sequence in sixteen gets a new page in every step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.core import Core
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.model_runner import ModelRunner
from rooflab.engine.scheduler import Scheduler
from rooflab.engine.sequence import Sequence


class _NoModel:
    """Replaces the model: it takes the batch's tensors and computes nothing with them."""

    def __init__(self, vocab_size: int, max_num_seqs: int):
        self.embedding = torch.zeros(1, 1)
        self.arch = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1)
        self._logits = torch.zeros(max_num_seqs, vocab_size)

    def forward(self, step: Any, cache: Any, ops: Any) -> torch.Tensor:
        return self._logits[: len(step.token_ids if step.drawn is None else step.drawn)]


class _NoOps:
    """Replaces the kernels: `sample` returns a constant."""

    def step(self, num_decodes: int, num_prompt_tokens: int, num_drafted: int = 0) -> SimpleNamespace:
        return SimpleNamespace(sample=lambda logits, *rest: torch.ones(len(logits), dtype=torch.int64))


def make_engine(num_sequences: int, context: int, block_size: int, steps: int) -> LLM:
    """An LLM without a model, with `num_sequences` submitted sequences of about `context` tokens."""
    length = context + steps + block_size + 1
    blocks = num_sequences * -(-length // block_size)
    llm = LLM.__new__(LLM)
    llm.scheduler = Scheduler(BlockManager(blocks, block_size), num_sequences, num_sequences * length)
    model: Any = _NoModel(8, num_sequences)
    ops: Any = _NoOps()
    llm.runner = ModelRunner(model, ops, blocks, block_size, num_sequences, length)
    llm.core = Core(llm.scheduler, llm.runner)
    for number in range(num_sequences):
        # Lengths differ by one token, so that in every step one sequence in `block_size` gets a new page.
        ids = [1] * (context - number % block_size)
        sequence = Sequence(number, ids, len(ids), SamplingParams(), number, frozenset((2,)), length, 0.0)
        llm.scheduler.submit(sequence)
    return llm


def measure(num_sequences: int = 256, context: int = 1024, block_size: int = 16, steps: int = 200) -> dict[str, Any]:
    """Milliseconds of host work per decode step (median, p20, p80), the pages appended per step, and the admission of a
    prompt of 32,768 tokens."""
    llm = make_engine(num_sequences, context, block_size, steps)
    while llm.scheduler.waiting or llm.scheduler.prefilling:
        llm.step()
    for _ in range(20):
        llm.step()
    before = llm.scheduler.blocks.num_free
    times = []
    for _ in range(steps - 25):
        begin = time.perf_counter()
        llm.step()
        times.append(1e3 * (time.perf_counter() - begin))
    assert len(llm.runner.batch) == num_sequences, "every sequence is still running"
    p20, median, p80 = (float(np.percentile(times, q)) for q in (20, 50, 80))
    appended = (before - llm.scheduler.blocks.num_free) / len(times)
    return {
        "sequences": num_sequences,
        "context": context,
        "block_size": block_size,
        "host_ms_median": median,
        "host_ms_p20": p20,
        "host_ms_p80": p80,
        "pages_appended_per_step": appended,
        "admission_ms": measure_admission(block_size),
    }


def measure_admission(block_size: int, num_tokens: int = 32768, rounds: int = 9) -> float:
    """Median milliseconds to admit a prompt of which no page is cached, and to publish its pages once computed."""
    times = []
    for number in range(rounds):
        blocks = BlockManager(-(-num_tokens // block_size) + 1, block_size)
        scheduler = Scheduler(blocks, 1, num_tokens)
        ids = list(range(number, number + num_tokens))
        sequence = Sequence(number, ids, num_tokens, SamplingParams(), 0, frozenset(), num_tokens + 1, 0.0)
        begin = time.perf_counter()
        scheduler.submit(sequence)
        (chunk,) = scheduler.schedule().chunks
        scheduler.computed(chunk)
        times.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(times))


def write_engine_numbers(folder: Path, name: str, case: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
    """Writes the floats of `result`, timed by `perf_counter` on a CPU, as one record of a new run; returns its path."""
    writer = RunWriter(folder)
    writer.write(
        Record(
            kind="engine",
            run_id=writer.run_id,
            status="OK",
            **Environment.now().record_fields(),
            case_id=name,
            case=case,
            device="cpu",
            basis="measured",
            timer="perf_counter",
            metrics={key: value for key, value in result.items() if isinstance(value, float)},
        )
    )
    return writer.path


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="Host work per decode step, the model excluded.")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.sequences, arguments.context, arguments.block_size)
    print(json.dumps(result, indent=2, allow_nan=False))
    if arguments.out:
        case = {key: result[key] for key in ("sequences", "context", "block_size")}
        write_engine_numbers(arguments.out, "engine_host", case, result)


if __name__ == "__main__":
    main()
