"""Compares the engine with transformers, or with llama.cpp, on one machine: ratios from interleaved readings.

    python results/cpu/make.py --rounds 7 --out results/local/vs
    python results/cpu/make.py --requests 64 --rounds 3
    python results/cpu/make.py --dtype int8 --against llama.cpp

All sides run the same GGUF, the same number of threads and greedy sampling.  Against transformers the weights are
dequantised, and it computes logits for the last position only; it needs `accelerate` to read a GGUF.  llama.cpp keeps
the file's Q4_1 weights, or has them as Q8_0 and Q4_0 beside int8 and int4; it needs `llama-cpp-python`, which nothing
here depends on.  Each round times both sides; they take turns to be first, so drift affects both equally.  The result
is the median of the rounds' ratios.  For mixed requests, transformers pads all rows and computes them until the longest
answer ends.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.load.model_files import fetch
from rooflab.engine.options import CODES, DTYPES

PROMPT_TOKENS = 512
ITL_CONTEXT = 64
NEW_TOKENS = 33
LENGTHS = {"prompt": (16, 128), "answer": (8, 64)}
"""The least and the most tokens of the prompt and of the answer of mixed requests."""


@dataclass(frozen=True)
class Reading:
    """The times of one side in one round."""

    ttft_ms: float
    """TTFT after a prompt of `PROMPT_TOKENS` tokens, with one token generated."""
    itl_ms: float
    """Median gap between `NEW_TOKENS` generated tokens after a prompt of `ITL_CONTEXT` tokens."""


def read_engine(llm: LLM, ids: list[int]) -> Reading:
    """Makes one reading of the engine."""
    one = llm.generate([ids[:PROMPT_TOKENS]], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    many = llm.generate([ids[:ITL_CONTEXT]], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))[0]
    return Reading(one.timeline.ttft_ms, float(np.median(many.timeline.itl_ms)))


@torch.inference_mode()
def read_transformers(model: Any, ids: list[int]) -> Reading:
    """Makes one reading of transformers: forward calls with its own cache; its `generate` would add other work."""

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


def read_llama_cpp(model: Any, ids: list[int]) -> Reading:
    """Makes one reading of llama.cpp: its own evaluation, and the greedy token of its logits."""

    def steps(prompt: list[int], count: int) -> list[float]:
        model.reset()
        times, tokens = [time.perf_counter()], prompt
        for _ in range(count):
            model.eval(tokens)
            tokens = [model.sample(temp=0.0)]
            times.append(time.perf_counter())
        return times

    first = steps(ids[:PROMPT_TOKENS], 1)
    gaps = np.diff(steps(ids[:ITL_CONTEXT], NEW_TOKENS)[1:])
    return Reading(1e3 * (first[1] - first[0]), 1e3 * float(np.median(gaps)))


@dataclass(frozen=True)
class BatchReading:
    """The time of one side for all requests."""

    batch_ms: float


def mixed_requests(count: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts with lengths from `LENGTHS`, and the lengths of their answers, from a fixed seed."""
    draw = random.Random(0)
    lengths = [(draw.randint(*LENGTHS["prompt"]), draw.randint(*LENGTHS["answer"])) for _ in range(count)]
    return [(draw.choices(range(vocab_size), k=prompt), answer) for prompt, answer in lengths]


def batch_of_engine(llm: LLM, requests: list[tuple[list[int], int]]) -> BatchReading:
    """The engine's time for all requests."""
    params = [SamplingParams(max_tokens=answer, ignore_eos=True) for _, answer in requests]
    began = time.perf_counter()
    llm.generate([prompt for prompt, _ in requests], params)
    return BatchReading(1e3 * (time.perf_counter() - began))


@torch.inference_mode()
def batch_of_transformers(model: Any, requests: list[tuple[list[int], int]]) -> BatchReading:
    """The time of transformers' `generate` for all requests in one batch, prompts padded on the left."""
    widest, longest = max(len(prompt) for prompt, _ in requests), max(answer for _, answer in requests)
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    began = time.perf_counter()
    model.generate(
        ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0
    )
    return BatchReading(1e3 * (time.perf_counter() - began))


def load_llama_cpp(path: Path, threads: int, dtype: str) -> Any:
    """The model in llama.cpp, with its own Q4_1 weights or, beside int8 and int4, requantised as Q8_0 and Q4_0.

    Raises `ValueError` without llama-cpp-python."""
    try:
        from llama_cpp import Llama, llama_cpp
    except ImportError:
        raise ValueError("against: llama.cpp needs the package llama-cpp-python, which is not installed") from None
    kinds = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
    if dtype in kinds:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        own, path = path, Path(folder.name) / f"{dtype}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = kinds[dtype], True
        llama_cpp.llama_model_quantize(str(own).encode(), str(path).encode(), ctypes.byref(options))
    return Llama(str(path), n_ctx=PROMPT_TOKENS + NEW_TOKENS, n_threads=threads, n_threads_batch=threads, verbose=False)


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    """The transformers model with dequantised weights from the same GGUF."""
    from transformers import AutoModelForCausalLM, GgufConfig

    # Without this option transformers keeps the weights quantised and multiplies with the quantised weights.
    plain = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, quantization_config=plain
    ).eval()


def compare(
    dtype: str, rounds: int, threads: int | None, requests: int = 0, against: str = "transformers"
) -> dict[str, Any]:
    """The readings of both sides in each round, and the medians of their ratios (the other side over the engine)."""
    if threads:
        torch.set_num_threads(threads)
    if against == "transformers" and dtype in CODES:
        raise ValueError(f"dtype: expected float32 or bfloat16 against transformers, got {dtype!r}")
    path = fetch()
    # Every round has the same prompt: with prefix caching, only the first round would compute it.
    llm = LLM(path, dtype=dtype, max_num_seqs=max(requests, 1), device="cpu", prefix_caching=False)
    text = "The roofline model relates performance to arithmetic intensity. " * 80
    ids = llm.tokenizer.encode(text)[:PROMPT_TOKENS]
    sides: dict[str, Callable[[], Any]]
    if against == "llama.cpp":
        other = load_llama_cpp(path, torch.get_num_threads(), dtype)
        sides = {"engine": lambda: read_engine(llm, ids), against: lambda: read_llama_cpp(other, ids)}
    else:
        other = load_transformers(path, DTYPES[dtype])
        mixed = mixed_requests(requests, llm.arch.vocab_size)
        if requests:
            sides = {
                "engine": lambda: batch_of_engine(llm, mixed),
                against: lambda: batch_of_transformers(other, mixed),
            }
        else:
            sides = {"engine": lambda: read_engine(llm, ids), against: lambda: read_transformers(other, ids)}
    for read in sides.values():
        read()
    readings: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            readings[name].append(sides[name]())
    result: dict[str, Any] = {"dtype": dtype, "threads": torch.get_num_threads(), "rounds": rounds, "against": against}
    result |= {"requests": requests} if requests else {}
    for metric in asdict(readings["engine"][0]):
        own, theirs = ([getattr(reading, metric) for reading in readings[name]] for name in ("engine", against))
        ratios = np.array(theirs) / np.array(own)
        result[f"engine_{metric}"], result[f"{against}_{metric}"] = float(np.median(own)), float(np.median(theirs))
        result[f"{metric.removesuffix('_ms')}_ratio"] = float(np.median(ratios))
        result[f"{metric.removesuffix('_ms')}_ratio_range"] = [float(ratios.min()), float(ratios.max())]
    result["readings"] = {name: [asdict(reading) for reading in values] for name, values in readings.items()}
    return result


def write_engine_numbers(folder: Path, case: Mapping[str, Any], result: Mapping[str, Any]) -> Path:
    """Writes the floats of `result`, timed by `perf_counter` on a CPU, as one record of a new run; returns its path."""
    writer = RunWriter(folder)
    writer.write(
        Record(
            kind="engine",
            run_id=writer.run_id,
            status="OK",
            **Environment.now().record_fields(),
            case_id="engine_vs_transformers",
            case=case,
            device="cpu",
            basis="measured",
            timer="perf_counter",
            metrics={key: value for key, value in result.items() if isinstance(value, float)},
        )
    )
    return writer.path


def main() -> None:
    """Compares the engine as the command line asks, and writes a record."""
    parser = argparse.ArgumentParser(description="The engine against transformers or llama.cpp, interleaved.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", *CODES), default="float32")
    parser.add_argument("--against", choices=("transformers", "llama.cpp"), default="transformers")
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    options = (arguments.dtype, arguments.rounds, arguments.threads, arguments.requests, arguments.against)
    try:
        result = compare(*options)
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps({key: value for key, value in result.items() if key != "readings"}, indent=2, allow_nan=False))
    if arguments.out:
        case: dict[str, Any] = {
            key: result[key] for key in ("dtype", "threads", "rounds", "against", "requests") if key in result
        }
        print(write_engine_numbers(arguments.out, case, result))


if __name__ == "__main__":
    main()
