"""Compares the engine with transformers on one machine: ratios of ITL and TTFT from interleaved readings.

    python -m rooflab.bench.measure.engine_vs_transformers --rounds 7 --out results/local/vs

Both sides run the same GGUF with dequantised weights, the same number of threads, greedy sampling and batch 1;
transformers makes logits for the last position only and needs `accelerate` to read a GGUF.  Each round times both; they
take turns to be first, so drift affects both equally.  The result is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooflab.bench.measure.engine_run import write_engine_numbers
from rooflab.engine.llm import DTYPES, LLM, SamplingParams
from rooflab.engine.model_files import fetch

PROMPT_TOKENS = 512
ITL_CONTEXT = 64
NEW_TOKENS = 33


@dataclass(frozen=True)
class Reading:
    """The times of one side in one round."""

    ttft_ms: float
    """TTFT after a prompt of `PROMPT_TOKENS` tokens, with one token generated."""
    itl_ms: float
    """Median gap between `NEW_TOKENS` generated tokens after a prompt of `ITL_CONTEXT` tokens."""


def read_engine(llm: LLM, ids: list[int]) -> Reading:
    """One reading of the engine."""
    one = llm.generate([ids[:PROMPT_TOKENS]], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    many = llm.generate([ids[:ITL_CONTEXT]], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))[0]
    return Reading(one.timeline.ttft_ms, float(np.median(many.timeline.itl_ms)))


@torch.inference_mode()
def read_transformers(model: Any, ids: list[int]) -> Reading:
    """One reading of transformers: forward calls with its own cache; its `generate` would add other work."""

    def steps(prompt: list[int], count: int) -> list[float]:
        cache, inputs = None, torch.tensor([prompt])
        times = [time.perf_counter()]
        for _ in range(count):
            out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, inputs = out.past_key_values, out.logits[:, -1:].argmax(-1)
            inputs.item()
            times.append(time.perf_counter())
        return times

    first = steps(ids[:PROMPT_TOKENS], 1)
    gaps = np.diff(steps(ids[:ITL_CONTEXT], NEW_TOKENS)[1:])
    return Reading(1e3 * (first[1] - first[0]), 1e3 * float(np.median(gaps)))


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The transformers model with dequantised weights from the same GGUF."""
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without this option transformers keeps the weights quantised and multiplies with the quantised weights.
    plain = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=plain
    ).eval()


def compare(dtype: str, rounds: int, threads: int | None) -> dict[str, Any]:
    """The readings of both sides in each round, and the medians of their ratios (transformers over engine)."""
    if threads:
        torch.set_num_threads(threads)
    path = fetch()
    # Every round has the same prompt: with prefix caching only the first would compute it.
    llm = LLM(path, dtype=dtype, max_num_seqs=1, device="cpu", prefix_caching=False)
    model = load_transformers(path, DTYPES[dtype])
    assert llm.tokenizer is not None, "a GGUF carries its tokenizer"
    text = "The roofline model relates performance to arithmetic intensity. " * 80
    ids = llm.tokenizer.encode(text)[:PROMPT_TOKENS]
    sides: dict[str, Callable[[], Reading]] = {
        "engine": lambda: read_engine(llm, ids),
        "transformers": lambda: read_transformers(model, ids),
    }
    for read in sides.values():
        read()
    readings: dict[str, list[Reading]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            readings[name].append(sides[name]())
    result: dict[str, Any] = {"dtype": dtype, "threads": torch.get_num_threads(), "rounds": rounds}
    for metric in ("ttft_ms", "itl_ms"):
        own, other = ([getattr(reading, metric) for reading in readings[name]] for name in ("engine", "transformers"))
        ratios = np.array(other) / np.array(own)
        result[f"engine_{metric}"], result[f"transformers_{metric}"] = float(np.median(own)), float(np.median(other))
        result[f"{metric.removesuffix('_ms')}_ratio"] = float(np.median(ratios))
        result[f"{metric.removesuffix('_ms')}_ratio_range"] = [float(ratios.min()), float(ratios.max())]
    result["readings"] = {name: [asdict(reading) for reading in values] for name, values in readings.items()}
    return result


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="The engine against transformers: TTFT and ITL, interleaved.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = compare(arguments.dtype, arguments.rounds, arguments.threads)
    print(json.dumps({key: value for key, value in result.items() if key != "readings"}, indent=2))
    if arguments.out:
        case = {key: result[key] for key in ("dtype", "threads", "rounds")}
        print(write_engine_numbers(arguments.out, "engine_vs_transformers", case, result))


if __name__ == "__main__":
    main()
