"""Records sections 11 to 20 of `rooflab learn`: runs of the engine on a CPU, and of its scheduler on a simulated clock.

Times are the shortest of `REPEATS` equal runs, because other programs on the CPU only make a run slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, cast

from rooflab.bench.core import why_noisy
from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.load.data import Data
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import summarize
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.core import Core
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.scheduler import Scheduler
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.roofline.architecture import get_architecture
from rooflab.roofline.device import DEVICES, get_device

Row = dict[str, Any]
REPEATS = 5
PAGE_TOKENS = 16
# Prompt tokens, answer tokens, and the step before which the request arrives.
REQUESTS = ((20, 4, 0), (24, 16, 0), (33, 4, 0), (40, 16, 2), (40, 8, 4), (12, 6, 6))
PAGES, BATCH_LIMIT, STEP_TOKENS = 11, 4, 64
OTHERS = ((16, 16, 0), (16, 16, 0), (512, 2, 4))
"""Two short requests decode when a prompt of 512 tokens arrives."""
CHUNK_SIZES = (None, 256, 128, 64)
SYSTEM = (
    "You are a guide for travellers. Answer in one short sentence. Use plain words, because many readers learn "
    "English. If you do not know the answer, say so. Never invent the name of a place, a price, or the time of a "
    "train. Give distances in kilometres and temperatures in degrees Celsius."
)
QUESTION = "What is the capital of France?"
SECONDS = {
    "another question": (SYSTEM, "What is the capital of Italy?"),
    "another word near the start": (SYSTEM.replace("guide", "helper"), QUESTION),
    "the same prompt again": (SYSTEM, QUESTION),
}
DRAFTED = {
    "copies its prompt": "Repeat this sentence: The capital of France is Paris, the capital of Italy is Rome, the "
    "capital of Spain is Madrid, and the capital of Japan is Tokyo.",
    "writes new text": "Write a Python dictionary of ten countries and their capitals.",
}
CURVES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "output_tokens_per_s", "goodput_requests_per_s")
RATES = (1, 2, 4, 6, 8, 12, 16, 20, 24)
LOAD = Data("prefix", (200, 800), (100, 300), prefix_len=1000, groups=4)
BATCH_LIMITS, CURVE_CHUNKS, CURVE_LIMITS = (32, 256), (None, 512), {"ttft": 500.0, "itl": 50.0}


def scheduler_of(continuous: bool) -> Scheduler:
    """Returns the scheduler of section 14: few pages, so that a request loses its pages, and no prefix cache."""
    blocks = BlockManager(PAGES, PAGE_TOKENS, prefix_caching=False)
    return Scheduler(blocks, BATCH_LIMIT, STEP_TOKENS, continuous=continuous)


def replay(core: Core, step: Callable[[], object], submit: Callable[[int], EngineSequence], arrivals: Any) -> list[Row]:
    """Runs requests to their ends.  `submit(i)` queues request `i` before step `arrivals[i]`.

    Returns for each step its `ms`, the `free` pages after it, and a cell for each request that has arrived: `w` waits,
    `p24` computes 24 tokens of its prompt, `d` decodes one token, `x` loses its pages, and an empty text has ended."""
    sequences, steps = list[EngineSequence](), list[Row]()
    while len(sequences) < len(arrivals) or core.scheduler.has_work:
        while len(sequences) < len(arrivals) and arrivals[len(sequences)] <= len(steps):
            sequences.append(submit(len(sequences)))
        has_ended = [sequence.finish_reason is not None for sequence in sequences]
        begin_s = time.perf_counter()
        step()
        step_ms = round(1e3 * (time.perf_counter() - begin_s), 2)
        cells = ["" if ended else _cell(core, one) for one, ended in zip(sequences, has_ended, strict=True)]
        steps.append({"ms": step_ms, "free": core.scheduler.blocks.num_free, "cells": cells})
    return steps


def _cell(core: Core, sequence: EngineSequence) -> str:
    assert core.last is not None, "each step of these runs has work"
    tokens = sum(chunk.end - chunk.start for chunk in core.last.chunks if chunk.sequence is sequence)
    if tokens:
        return f"p{tokens}"
    has_waited = sequence in core.scheduler.waiting or sequence in core.scheduler.prefilling
    return "x" if sequence in core.last.preempted else "w" if has_waited else "d"


def _replayed(llm: LLM, schedulers: Mapping[Any, Callable[[], Scheduler]], requests: Any) -> list[list[Row]]:
    """Returns the steps of `requests` for each scheduler, each step with its shortest time.  The runs take turns."""
    ids = llm.tokenizer.encode(SYSTEM * 9)

    def submit(index: int) -> EngineSequence:
        prompt_tokens, output_tokens, _ = requests[index]
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        return llm.submit(ids[index : index + prompt_tokens], params, float(index))[0]

    runs: list[list[list[Row]]] = [[] for _ in schedulers]
    for _, (own, make) in product(range(REPEATS), zip(runs, schedulers.values(), strict=True)):
        llm.scheduler = llm.core.scheduler = make()
        own.append(replay(llm.core, llm.step, submit, [arrival for _, _, arrival in requests]))
    return [[{**same[0], "ms": min(step["ms"] for step in same)} for same in zip(*own, strict=True)] for own in runs]


def batching(llm: LLM) -> Row:
    """Returns the steps of six requests with continuous batching and with static batches."""
    modes = {"continuous": lambda: scheduler_of(True), "static": lambda: scheduler_of(False)}
    asked = [dict(zip(("prompt", "output", "arrives"), request, strict=True)) for request in REQUESTS]
    steps = dict(zip(modes, _replayed(llm, modes, REQUESTS), strict=True))
    return {"requests": asked, "pages": PAGES, "batch_limit": BATCH_LIMIT, "steps": steps}


def chunks(llm: LLM) -> Row:
    """Returns the steps of two decoding requests and a long prompt, for each size of chunk; None: the whole prompt."""

    def scheduler(size: int | None) -> Scheduler:
        return Scheduler(BlockManager(64, PAGE_TOKENS, False), 4, 2048, size or 2**31, chunked=size is not None)

    found = _replayed(llm, {size: partial(scheduler, size) for size in CHUNK_SIZES}, OTHERS)
    runs = [{"chunk": size, "steps": steps} for size, steps in zip(CHUNK_SIZES, found, strict=True)]
    return {"prompt": OTHERS[-1][0], "arrives": OTHERS[-1][2], "runs": runs}


def _ttfts_ms(llm: LLM, first: list[int], asked: Sequence[tuple[list[int], bool]]) -> list[float]:
    """Returns the shortest TTFT of each prompt in `asked` after `first`, with or without a prefix cache."""
    times_ms: list[list[float]] = [[] for _ in asked]
    for _, (own, (second, prefix_caching)) in product(range(REPEATS), zip(times_ms, asked, strict=True)):
        llm.scheduler = llm.core.scheduler = Scheduler(BlockManager(64, PAGE_TOKENS, prefix_caching), 4, 2048)
        _, output = (llm.generate(ids, SamplingParams(max_tokens=1))[0] for ids in (first, second))
        own.append(output.timeline.ttft_ms)
    return [round(min(own), 2) for own in times_ms]


def prefix(llm: LLM) -> Row:
    """Returns a first prompt, second prompts with their TTFT, and the TTFT by the number of shared pages."""

    def prompt(system: str, question: str) -> tuple[Any, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        ids = llm.tokenizer.encode(messages)
        return ids, [llm.tokenizer.named(token)[0] for token in ids]

    ids, texts = prompt(SYSTEM, QUESTION)
    others, size = llm.tokenizer.encode(SYSTEM.upper() * 2), PAGE_TOKENS
    cut = [ids[: size * pages] + others[: len(ids) - size * pages] for pages in range(len(ids) // size + 1)]
    prompts = {name: prompt(*own) for name, own in SECONDS.items()}
    seconds: list[Row] = [{"name": name, "ids": own[0], "texts": own[1]} for name, own in prompts.items()]
    asked = [(one["ids"], caching) for one in seconds for caching in (True, False)]
    times = _ttfts_ms(llm, ids, [*asked, *((one, True) for one in cut), (ids, False)])
    for index, one in enumerate(seconds):
        one |= dict(zip(("ttft_with_ms", "ttft_without_ms"), times[2 * index :], strict=False))
    cuts = {"cut_ms": times[len(asked) : -1], "whole_ms": times[-1]}
    return {"page_tokens": size, "first": {"ids": ids, "texts": texts}, "seconds": seconds, **cuts}


def drafts() -> Row:
    """Returns for each step of two answers its `ms`, its `draft`, and the tokens that the model `drew` to check it."""
    llm = LLM("smollm2-135m", device="cpu", speculate="ngram", num_kv_blocks=64, prefix_caching=False)
    runs, runner, run_step = list[Row](), cast(Any, llm.runner), cast(Any, llm.runner.run)
    for name, text in [*DRAFTED.items()] * 2:  # the first two runs warm up
        drawn: list[list[int]] = []

        def spied(step: Any, drawn: list[list[int]] = drawn) -> Any:
            draw = run_step(step)
            drawn.append(draw.tokens())
            return draw

        runner.run = spied
        (sequence,) = llm.submit([{"role": "user", "content": text}], SamplingParams(max_tokens=48))
        steps: list[Row] = []
        while sequence.finish_reason is None:
            begin_s = time.perf_counter()
            llm.step()
            step_ms = round(1e3 * (time.perf_counter() - begin_s), 2)
            steps.append({"ms": step_ms, "draft": next(iter(runner.drafts.values()), []), "drew": drawn[-1]})
        runs.append({"name": name, "prompt": text, "steps": steps, "answer": sequence.output_ids})
    runs = runs[2:]
    used = {token for run in runs for step in run["steps"] for token in (*step["draft"], *step["drew"])}
    return {"runs": runs, "texts": {str(token): llm.tokenizer.named(token)[0] for token in sorted(used)}}


def plan_of(rate: float) -> Plan:
    """Returns the load of section 20 at `rate` requests per second."""
    return Plan(rate=rate, num_prompts=300, data=LOAD, model="llama-3.1-8b")


def curves() -> Row:
    """Returns the predicted latencies and throughput of a model on an H100, by settings of the engine and rate."""
    kernels, settings = KernelTimes(get_architecture("llama-3.1-8b"), get_device("h100")), []
    for seqs, chunk, caching in product(BATCH_LIMITS, CURVE_CHUNKS, (False, True)):
        own = ClockSettings(2**20, PAGE_TOKENS, seqs, 8192, chunk, caching).fitting(kernels)
        rows = [summarize(simulate(kernels, plan_of(rate), own), CURVE_LIMITS) for rate in RATES]
        points = {name: [float(f"{row[name]:.4g}") for row in rows] for name in CURVES}
        settings.append({"max_num_seqs": seqs, "prefill_chunk": chunk, "prefix_caching": caching, **points})
    return {"rates": RATES, "basis": kernels.basis, "limits": CURVE_LIMITS, "settings": settings}


def gpus() -> Row:
    """Returns the figures of data sheets that the estimator and the scaling section need, by the GPU's name."""
    names = ("full_name", "hbm_bytes", "hbm_bytes_per_s", "nvlink_bytes_per_s", "nvlink_gpus", "pcie_bytes_per_s")
    figures = {gpu.name: {name: getattr(gpu, name) for name in names} for gpu in DEVICES.values()}
    for name, own in figures.items():
        own |= {"sm": DEVICES[name].compute_capability[0], "bf16_flops_per_s": DEVICES[name].matrix_flops_per_s["bf16"]}
    return {"gpus": figures}


def files() -> dict[str, Row]:
    """Returns the contents of the data files by their names."""
    llm, before = LLM("smollm2-135m", device="cpu", num_kv_blocks=64, max_num_seqs=4), run_times()
    runs = {"batching": batching(llm), "chunks": chunks(llm), "prefix": prefix(llm), "drafts": drafts()}
    noise = {"noise": why_noisy([], waiting_since(before))}
    made = {f"{name}.json": content | noise for name, content in runs.items()}
    return made | {"curves.json": curves(), "gpus.json": gpus()}
