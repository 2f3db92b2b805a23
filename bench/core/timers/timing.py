"""The timing protocol of the bench.  The docstring of `time_functions` describes the protocol."""

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
from rooflab.bench.core.settings import check_device
from rooflab.bench.core.timers import Function, Timer, tampered
from rooflab.bench.core.timers.cpu import CpuTimer

perf_counter = time.perf_counter
STEPS_PER_SAMPLE = 10
"""The least number of timer steps per sample.  A shorter sample would measure the resolution of the timer."""
MAX_CALLS_PER_SAMPLE = 1000
MAX_SAMPLES = 1000
FIRST_CALLS = 2
"""Calls of each function before the warm-up.  The second call may also compile, for other inputs or other sizes."""
WARM_UP_SHARE = 0.3
"""The warm-up ends at the latest after this share of the budget."""
CLOSING_ROUNDS = 3
"""The number of last rounds with equal values.  In these rounds a `calls.Rotation` uses each set of inputs once."""
STEADY = 0.95
"""The warm-up goes on while a round lowers the fastest time of a function below this share of the earlier value."""


def timer_for(device: torch.device, cold: bool = True, flush: str = "read") -> Timer:
    """The timer of a device.  With `cold` the timer empties the cache before each sample.  Raises `ValueError` if the
    device is neither cpu nor cuda, and on an unknown flush."""
    check_device(device.type)
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
    """Times functions of no arguments against each other.  The protocol:

    1. Call each function twice.  These first calls may compile, autotune and load: they are outside the budget.  Then
       warm up in rounds of one call per function, so that caches and clocks settle.  The warm-up ends when a round
       makes no function 5% faster than its fastest call so far (after at least three rounds, or 30% of the budget).
    2. Sample in rounds.  Each round times every function once, so that drift affects all functions equally.  The order
       is drawn from `seed`, rotated by one each round and reversed every second round, so that positions are balanced.
    3. Before each sample the last-level cache is emptied by *reading* a buffer of twice the cache's reported size.
       The flush reads, because dirty lines of a flush would be written back inside the next sample.  `flush="write"`
       writes, for cards on which writing empties the cache better (`results/targets/flush.py`); `cold=False` does not
       flush.  The caller's functions must cycle through several copies of random inputs; `renew` changes the values of
       the inputs before each round, except the last three.
    4. On a CPU a sample is the difference of two `perf_counter` readings.  torch's threads are pinned, or the method's
       name says why they are not; the allocator keeps what a call frees (`cpu.keep_freed_memory`).
    5. On CUDA every sample is enqueued behind a wait on the device that outlasts the host's work, so that the flush
       and the launches run back to back.  If the wait was too short, the sample is taken again with a longer wait.  If
       a function itself waits for the device, the method's name says so.  A sample is a pair of events on the current
       stream, so every function can be timed, and the device does no additional work.
    6. Several calls share one sample if, in the warm-up, a call was shorter than ten steps of the clock.  Then only the
       first call finds the cache cold, and the L2 state of the reading is `warm`.  If a sample is still shorter than
       ten steps, it is not `resolved`.
    7. Samples are taken for `budget_s` seconds in all, warm-up included, and until there are `min_samples`, even if
       that takes longer.  If there are fewer than a quarter of the samples that fit into the budget at the median
       round (`noise.few`), the budget is doubled.  If one reading is noise (`noise.noise`), all functions are sampled
       on until no reading is noise, for at most `more_s` seconds.  All samples are kept raw, in time order.  Python's
       garbage collector is off.
    8. Afterwards the clock functions and the number of threads are checked: a change is the fault of every reading.

    `observe` is called once per round of samples, between samples, but not in the warm-up; on CUDA it is called while
    the device works.  If `timer` (from `timer_for`) is given, `device`, `cold` and `flush` are ignored.

    Raises `ValueError` on no functions, a budget that is not positive, fewer than one sample, or another device.
    """
    _check_arguments(functions, budget_s, min_samples)
    watch = timer or timer_for(torch.device(device), cold, flush)
    threads, closing, most = torch.get_num_threads(), CLOSING_ROUNDS if renew else 0, max(MAX_SAMPLES, min_samples)
    readings: dict[str, list[float]] = {name: [] for name in functions}
    ends: list[float] = []
    orders = _orders(list(functions), seed)

    def take() -> None:
        order = [(name, functions[name], calls[name]) for name in next(orders)]
        for name, seconds in watch.round(order, observe).items():
            readings[name].append(seconds)

    def judged(waited: float | None) -> tuple[str, dict[str, str]]:
        """Why there are too few samples, and for each function why its samples are noise."""
        lacking = few(min(map(len, readings.values())), _room(ends, budget_s))
        return lacking, {name: why_noisy(values, waited) or lacking for name, values in readings.items()}

    with ExitStack() as stack:
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        for function in [*functions.values()] * FIRST_CALLS:
            watch.first_call(function)
        began = perf_counter()
        fastest = _warm_up(watch, functions, began + WARM_UP_SHARE * budget_s)
        calls = {name: _calls_per_sample(watch, fastest[name]) for name in functions}
        with watch.sampling() as waiting:
            while (taken := min(map(len, readings.values()))) < most - closing:
                ends.append(perf_counter())
                spent = ends[-1] - began
                if taken >= min_samples - closing and spent > budget_s:
                    lacking, noisy = judged(waiting())
                    if spent > budget_s + max(more_s, budget_s if lacking else 0.0) or not any(noisy.values()):
                        break
                if renew:
                    renew()
                take()
            for _ in range(closing):
                take()
            lacking, noisy = judged(waiting())
        replaced = tampered(threads)
        samples_of = {}
        for name, values in readings.items():
            samples = _samples(watch, name, values, calls[name], cold)
            samples_of[name] = replace(samples, noise=noisy[name], few=lacking, fault=replaced or "")
        return samples_of


def _check_arguments(functions: Mapping[str, Function], budget_s: float, min_samples: int) -> None:
    if not functions:
        raise ValueError("functions: expected at least one, got none")
    if not budget_s > 0:
        raise ValueError(f"budget_s: expected a positive number of seconds, got {budget_s}")
    if min_samples < 1:
        raise ValueError(f"min_samples: expected at least 1, got {min_samples}")


def _room(ends: Sequence[float], budget_s: float) -> int:
    """The number of rounds that fit into a budget after the warm-up: the time left, divided by the median round's time.

    `ends` are the times at which rounds began and ended.
    """
    median_s = float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0
    return min(MAX_SAMPLES, int((1 - WARM_UP_SHARE) * budget_s / median_s)) if median_s > 0 else 0


def _samples(watch: Timer, name: str, values: Sequence[float], calls: int, cold: bool) -> Samples:
    return Samples(
        seconds=tuple(value / calls for value in values),
        method=watch.method(name) + (f", {calls} calls per sample" if calls > 1 else ""),
        l2_state="cold" if cold and calls == 1 else "warm",
        calls_per_sample=calls,
        resolved=float(np.median(values)) >= STEPS_PER_SAMPLE * watch.step_s(values),
        launch_floor_s=watch.launch_floor_s(calls),
    )


def _orders(names: list[str], seed: int) -> Iterator[list[str]]:
    random.Random(seed).shuffle(names)
    for turn in itertools.count():
        start = turn // 2 % len(names)
        order = names[start:] + names[:start]
        yield order if turn % 2 == 0 else order[::-1]


def _warm_up(watch: Timer, functions: Mapping[str, Function], deadline: float) -> dict[str, float]:
    """Warms up the functions, and returns the fastest reading of each function."""
    fastest = dict.fromkeys(functions, math.inf)
    for rounds in itertools.count(1):
        read = watch.round([(name, function, 1) for name, function in functions.items()])
        steady = all(seconds >= STEADY * fastest[name] for name, seconds in read.items())
        fastest = {name: min(seconds, fastest[name]) for name, seconds in read.items()}
        if (steady and rounds >= 3) or perf_counter() > deadline:
            break
    return fastest


def _calls_per_sample(watch: Timer, seconds: float) -> int:
    shortest_s = STEPS_PER_SAMPLE * watch.step_s([seconds])
    if seconds >= shortest_s:
        return 1
    # A call of zero measured time gets the most calls that a sample may have.
    return min(MAX_CALLS_PER_SAMPLE, math.ceil(2 * shortest_s / seconds)) if seconds > 0 else MAX_CALLS_PER_SAMPLE
