"""How many requests a second a model serves within limits, by how many GPUs and with which chunk of prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.load.arrivals import Arrivals
from rooflab.bench.load.load_run import Plan
from rooflab.bench.load.metrics import times_of
from rooflab.roofline.llm import PREFILL_CHUNK_TOKENS, activation_bytes, kv_bytes_per_token, weight_bytes

MEMORY_FRACTION = 0.9
"""Of a GPU's memory, as in `roofline/llm.py`."""
CLOSE = 1.05
"""The search ends where the rate that holds and the one that does not are so near; seeds differ by more."""
SEEDS = 3
HIGHEST = 4.0**7
"""Requests a second beyond which no search goes."""
BEFORE = 0.2
"""Share of the requests that are not judged, because the load has not settled."""


def kv_blocks(model: KernelTimes, settings: ClockSettings) -> int:
    """Pages of the KV cache that fit beside weights and activations; 0 if none does."""
    tokens = max(settings.max_num_batched_tokens, PREFILL_CHUNK_TOKENS)
    used = weight_bytes(model.arch, model.weight_dtype, model.gpus)
    used += activation_bytes(model.arch, tokens, settings.max_num_seqs, model.weight_dtype, model.gpus)
    free = MEMORY_FRACTION * model.device.hbm_bytes - used
    page = settings.block_size * kv_bytes_per_token(model.arch, model.kv_dtype, model.gpus)
    return max(0, int(free / page))


def fitting(model: KernelTimes, settings: ClockSettings) -> ClockSettings:
    """The settings with as many pages as fit.  Raises `ValueError` if none does."""
    pages = kv_blocks(model, settings)
    if not pages:
        raise ValueError(f"gpus: expected room for the weights of {model.arch.name}, got {model.gpus}")
    return replace(settings, num_kv_blocks=pages)


def holds(model: KernelTimes, plan: Plan, settings: ClockSettings, limits: Mapping[str, float], q: float) -> bool:
    """Whether the `q`-th percentiles of TTFT and ITL are within the limits in milliseconds, of all but the first."""
    later = simulate(model, plan, settings).requests[int(BEFORE * plan.num_prompts) :]
    found = [times for request in later if (times := times_of(request))]
    ttft = np.array([one.ttft_ms for one in found])
    values = {"ttft": ttft, "itl": np.concatenate([one.itl_ms for one in found])}
    return all(np.percentile(values[name], q) <= limit for name, limit in limits.items() if values[name].size)


def most_requests_per_s(
    model: KernelTimes, plan: Plan, settings: ClockSettings, limits: Mapping[str, float], q: float, near: float = 1.0
) -> float:
    """The highest Poisson rate within the limits; 0 if no rate is, `HIGHEST` if each that is tried.

    `near`: where the search begins.
    """

    def good(rate: float) -> bool:
        return holds(model, replace(plan, arrivals=Arrivals(rate)), settings, limits, q)

    step = 4.0 if near == 1 else 1.3
    low, high = 0.0, near
    while high < HIGHEST and good(high):
        low, high = high, step * high
    if high >= HIGHEST:
        return HIGHEST
    while not low and high > 1e-3:
        high /= step
        low = high if good(high) else 0.0
    high = step * low
    while low and high / low > CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def capacities(
    model: KernelTimes,
    plan: Plan,
    settings: ClockSettings,
    limits: Mapping[str, float],
    q: float,
    gpus: Iterable[int],
    chunks: Iterable[int],
) -> list[dict[str, Any]]:
    """A row for each number of GPUs and size of a chunk, with the rate, and the rate for each GPU.

    The rate is the median of `SEEDS` loads, with the least and the most of them: p99 of some hundred requests moves by
    a tenth from load to load.
    """
    rows: list[dict[str, Any]] = []
    for count in gpus:
        # Another object for each: the times of a grid are kept in it.
        own = replace(model, gpus=count)
        for chunk in chunks:
            budget = max(settings.max_num_batched_tokens, chunk)
            taken = replace(settings, prefill_chunk=chunk, max_num_batched_tokens=budget)
            pages = kv_blocks(own, taken)
            row: dict[str, Any] = {"gpus": count, "prefill_chunk": chunk, "kv_tokens": pages * taken.block_size}
            if not pages:
                rows.append(row | {"why": "no page fits beside weights and activations"})
                continue
            rates, near = list[float](), 1.0
            for seed in range(plan.seed, plan.seed + SEEDS):
                load = replace(plan, seed=seed)
                rates.append(most_requests_per_s(own, load, replace(taken, num_kv_blocks=pages), limits, q, near))
                near = rates[-1] if 0 < rates[-1] < HIGHEST else 1.0
            low, rate, high = sorted(rates)[0], median(rates), sorted(rates)[-1]
            row |= {"requests_per_s": rate, "least": low, "most": high, "requests_per_s_per_gpu": rate / count}
            rows.append(row | ({"why": "within the limits at every rate"} if low >= HIGHEST else {}))
    return rows
