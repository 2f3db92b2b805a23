"""Implements the benchmark's timing protocol, which the docstring of `time_functions` describes."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core.noise import Samples, few, why_noisy
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timers import Function, Timer, tampered
from rooflab.bench.core.timers.cpu import CpuTimer

perf_counter = time.perf_counter
STEPS_PER_SAMPLE = 10
"""The least number of timer steps per sample.  A shorter sample would measure the resolution of the timer."""
MAX_CALLS_PER_SAMPLE = 1000
MAX_SAMPLES = 1000
SETUP_CALL_COUNT = 2
"""Calls of each function before the warm-up.  The second call may also compile, for other inputs or other sizes."""
WARM_UP_SHARE = 0.3
"""The warm-up ends at the latest after this share of the budget."""
N_LAST_ROUNDS = 3
"""The number of last rounds with equal values.  In these rounds a `calls.Rotation` uses each set of inputs once."""
MIN_STEADY_RATIO = 0.95
"""The warm-up goes on while a round lowers the fastest time of a function below this share of the earlier value."""


def timer_for(device: torch.device, cold: bool = True, flush: str = "read") -> Timer:
    """Returns a device's timer.  With `cold`, it empties the cache before each sample by reading or writing memory:
    `flush` is "read" or "write".  Raises `ValueError` on another `flush` or a device other than cpu and cuda."""
    Settings(device=device.type)  # refuses another device
    if device.type == "cpu":
        return CpuTimer(cold, flush)
    from rooflab.bench.core.timers.cuda import CudaCalls, EventTimer  # imported where there is a GPU

    return EventTimer(CudaCalls(device), cold, flush)


def time_functions(
    functions: Mapping[str, Function],
    device: torch.device | str = "cpu",
    *,
    budget_s: float = 1.0,
    more_s: float = 0.0,
    min_samples: int = 5,
    seed: int = 0,
    cold: bool = True,
    observe: Function | None = None,
    timer: Timer | None = None,
    flush: str = "read",
    renew: Function | None = None,
) -> dict[str, Samples]:
    """Times functions without arguments in turn, so that their times can be compared.  The protocol:

    1. Call each function twice, outside the budget, to compile, autotune and load.  Then warm up in rounds of one call
       per function, for at most 30% of the budget.  The warm-up ends earlier if, after three or more rounds, a round
       makes no function 5% faster.
    2. Take samples in rounds.  Each round times every function once, so that drift affects all functions equally.  The
       order is drawn from `seed`, reversed in the next round, and then rotated by one position.
    3. Empty the last-level cache before each sample, by *reading* a buffer of twice the cache's reported size.  Written
       (dirty) lines would be copied back to memory during the next sample.  `flush="write"` writes, for GPUs on which
       writing empties the cache better (`results/targets/flush.py`).  `cold=False` does not flush.  `renew` is called
       before each round and changes the values of the inputs.  It is not called in the last three rounds.
    4. On a CPU, a sample is the difference of two `perf_counter` readings.  torch's threads are pinned.  If they cannot
       be pinned, the result's text `method` says why.  The allocator keeps freed memory (`cpu.keep_freed_memory`).
    5. On CUDA, a sample is the time between two events on the current stream.  Enqueue it behind a wait on the device,
       so that the flush and the launches run without gaps.  If the wait was too short, take the sample again with a
       longer wait.  If a function itself waits for the device, the result's text `method` says so.
    6. If a call took less than ten steps of the clock, put several calls into one sample.  Only the first call finds
       the cache cold, so the result's L2 state is `warm`.  If a sample still takes less than ten steps, the result is
       not `resolved`.
    7. Take samples for `budget_s` seconds in all, warm-up included, but at least `min_samples` samples.  Double the
       budget if fewer than a quarter of the expected samples are taken (`noise.few`).  If samples are noisy
       (`noise.why_noisy`), continue with all functions for at most `more_s` seconds.  Keep all raw samples in time
       order.  Python's garbage collector is off.
    8. Afterwards check the clock functions and the number of threads.  A change makes every result invalid.

    `observe` is called once per round of samples.  On CUDA it is called while the device works.  If `timer` (from
    `timer_for`) is given, `device`, `cold` and `flush` are ignored.

    Raises `ValueError` without functions, on a budget <= 0, `min_samples` < 1, or a device other than cpu and cuda."""
    _check_arguments(functions, budget_s, min_samples)
    active_timer = timer or timer_for(torch.device(device), cold, flush)
    threads, last_rounds, limit = torch.get_num_threads(), N_LAST_ROUNDS if renew else 0, max(MAX_SAMPLES, min_samples)
    samples_s: dict[str, list[float]] = {name: [] for name in functions}
    round_starts_s: list[float] = []
    function_orders = _orders(list(functions), seed)

    def take() -> None:
        ordered_calls = [(name, functions[name], calls_per_sample[name]) for name in next(function_orders)]
        for name, sample_s in active_timer.round(ordered_calls, observe).items():
            samples_s[name].append(sample_s)

    def judged(waited: float | None) -> tuple[str, dict[str, str]]:
        """Returns why samples are too few ("" if not), and for each function why its samples are noisy ("" if not)."""
        few_text = few(min(map(len, samples_s.values())), _room(round_starts_s, budget_s))
        return few_text, {name: why_noisy(sample_times, waited) or few_text for name, sample_times in samples_s.items()}

    with ExitStack() as exit_stack:
        if gc.isenabled():
            exit_stack.callback(gc.enable)
            gc.disable()
        for function in [*functions.values()] * SETUP_CALL_COUNT:
            active_timer.first_call(function)
        start_s = perf_counter()
        fastest_times = _warm_up(active_timer, functions, start_s + WARM_UP_SHARE * budget_s)
        calls_per_sample = {name: _calls_per_sample(active_timer, fastest_times[name]) for name in functions}
        with active_timer.sampling() as wait_meter:
            while (sample_count := min(map(len, samples_s.values()))) < limit - last_rounds:
                round_starts_s.append(perf_counter())
                spent = round_starts_s[-1] - start_s
                if sample_count >= min_samples - last_rounds and spent > budget_s:
                    few_text, noise_by_name = judged(wait_meter())
                    if spent > budget_s + max(more_s, budget_s if few_text else 0.0) or not any(noise_by_name.values()):
                        break
                if renew:
                    renew()
                take()
            for _ in range(last_rounds):
                take()
            few_text, noise_by_name = judged(wait_meter())
        tampering = tampered(threads)
        samples_by_name = {}
        for name, sample_times in samples_s.items():
            new_samples = _samples(active_timer, name, sample_times, calls_per_sample[name], cold)
            samples_by_name[name] = replace(new_samples, noise=noise_by_name[name], few=few_text, fault=tampering or "")
        return samples_by_name


def _check_arguments(functions: Mapping[str, Function], budget_s: float, min_samples: int) -> None:
    if not functions:
        raise ValueError("functions: expected at least one, got none")
    if not budget_s > 0:
        raise ValueError(f"budget_s: expected a positive number of seconds, got {budget_s}")
    if min_samples < 1:
        raise ValueError(f"min_samples: expected at least 1, got {min_samples}")


def _room(ends: Sequence[float], budget_s: float) -> int:
    """Returns how many timed rounds fit into the budget after the warm-up: remaining time by median round time.

    `ends` lists the times at which rounds began and ended.
    """
    median_round_s = float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0
    return min(MAX_SAMPLES, int((1 - WARM_UP_SHARE) * budget_s / median_round_s)) if median_round_s > 0 else 0


def _samples(watch: Timer, name: str, values: Sequence[float], calls: int, cold: bool) -> Samples:
    return Samples(
        seconds=tuple(sample_s / calls for sample_s in values),
        method=watch.method(name) + (f", {calls} calls per sample" if calls > 1 else ""),
        l2_state="cold" if cold and calls == 1 else "warm",
        calls_per_sample=calls,
        resolved=float(np.median(values)) >= STEPS_PER_SAMPLE * watch.step_s(values),
        launch_floor_s=watch.launch_floor_s(calls),
    )


def _orders(names: list[str], seed: int) -> Iterator[list[str]]:
    random.Random(seed).shuffle(names)
    for round_index in itertools.count():
        start_index = round_index // 2 % len(names)
        name_order = names[start_index:] + names[:start_index]
        yield name_order if round_index % 2 == 0 else name_order[::-1]


def _warm_up(watch: Timer, functions: Mapping[str, Function], deadline: float) -> dict[str, float]:
    """Runs functions until their times are steady or `deadline` has passed. Returns each function's fastest time."""
    fastest_times = dict.fromkeys(functions, math.inf)
    for round_count in itertools.count(1):
        seconds_by_name = watch.round([(name, function, 1) for name, function in functions.items()])
        is_steady = all(call_s >= MIN_STEADY_RATIO * fastest_times[name] for name, call_s in seconds_by_name.items())
        fastest_times = {name: min(call_s, fastest_times[name]) for name, call_s in seconds_by_name.items()}
        if (is_steady and round_count >= 3) or perf_counter() > deadline:
            break
    return fastest_times


def _calls_per_sample(watch: Timer, seconds: float) -> int:
    min_sample_s = STEPS_PER_SAMPLE * watch.step_s([seconds])
    if seconds >= min_sample_s:
        return 1
    # A call of zero measured time gets the most calls that a sample may have.
    return min(MAX_CALLS_PER_SAMPLE, math.ceil(2 * min_sample_s / seconds)) if seconds > 0 else MAX_CALLS_PER_SAMPLE
