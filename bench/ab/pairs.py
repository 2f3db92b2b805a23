"""Pairs of fresh processes in seeded ABBA order, within a budget.  What a process is, is the caller's affair."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rooflab.bench.records.record import L2State, Status

SideName = Literal["A", "B"]


@dataclass(frozen=True)
class Reading:
    """What one fresh process says of one kernel."""

    status: Status
    reason: str = ""
    seconds: tuple[float, ...] = ()
    """All samples, seconds per call, in time order."""
    median_s: float | None = None
    method: str = ""
    l2_state: L2State | None = None
    checked_by: str = "none"
    activity_hash: str | None = None
    device_kernels: tuple[str, ...] = ()
    least_bytes: float | None = None
    flops: float | None = None
    role: str | None = None
    backend: str | None = None
    timestamp: str = ""
    """When it was read, UTC."""


Readings = Mapping[str, Reading]
Measure = Callable[[SideName, Collection[str]], Readings]
"""Starts one process of a side, which measures these comparisons, and returns what it read by key."""


@dataclass
class Batch:
    """What a run of pairs gave, by comparison."""

    pairs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Medians (A, B) of each pair, in time order."""
    readings: list[tuple[int, SideName, str, Reading]] = field(default_factory=list)
    """Every reading with its pair, side and key, in time order."""
    broken: dict[str, tuple[SideName, Reading]] = field(default_factory=dict)
    """The first reading of each comparison that was not OK; it is not measured again."""
    stopped: str = ""
    """Why there are fewer pairs than were asked for."""


def orders(seed: int) -> Iterator[tuple[SideName, SideName]]:
    """The order of each pair: blocks of ABBA and BAAB, drawn from `seed`, so that a steady drift cancels in each."""
    coin = random.Random(seed)
    while True:
        first: tuple[SideName, SideName] = ("A", "B") if coin.random() < 0.5 else ("B", "A")
        yield first
        yield first[1], first[0]


def run_pairs(
    measure: Measure,
    keys: Collection[str],
    pairs: int,
    *,
    seed: int = 0,
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    done: Callable[[str], None] = lambda text: None,
) -> Batch:
    """Up to `pairs` pairs over `keys`; none is begun that would end after `deadline` (of `clock`), judged by the last.

    A comparison whose reading is not OK leaves the run; the others go on.
    """
    batch = Batch(pairs={key: [] for key in keys})
    order = orders(seed)
    longest = 0.0
    for number in range(pairs):
        alive = [key for key in keys if key not in batch.broken]
        began = clock()
        if not alive:
            break
        if began + longest > deadline:
            batch.stopped = f"the budget ended after {number} of {pairs} pairs"
            break
        read: dict[SideName, Readings] = {}
        for side in next(order):
            read[side] = measure(side, alive)
            done(f"pair {number + 1} of {pairs}, side {side}")
        for key in alive:
            _keep(batch, number, key, read["A"], read["B"])
        longest = max(longest, clock() - began)
    return batch


def _keep(batch: Batch, number: int, key: str, first: Readings, second: Readings) -> None:
    nothing = Reading("RUNTIME_ERROR", "the process gave no reading of it")
    medians = []
    sides: tuple[tuple[SideName, Reading], ...] = (("A", first.get(key, nothing)), ("B", second.get(key, nothing)))
    for side, reading in sides:
        batch.readings.append((number, side, key, reading))
        fault = fault_of(reading)
        if fault is not None:
            batch.broken.setdefault(key, (side, fault))
        medians.append(reading.median_s)
    if key not in batch.broken and medians[0] is not None and medians[1] is not None:
        batch.pairs[key].append((medians[0], medians[1]))


def fault_of(reading: Reading) -> Reading | None:
    """The reading if it is none that can be compared: not OK, or without a time that a clock can have shown."""
    if reading.status != "OK":
        return reading
    if reading.median_s is None:
        return Reading("INVALID", "no time was read")
    if not math.isfinite(reading.median_s) or not all(math.isfinite(value) for value in reading.seconds):
        return Reading("INVALID", "a sample is not a finite number")
    if reading.median_s <= 0 or any(value < 0 for value in reading.seconds):
        return Reading("INVALID", "the timer did not move while the kernel ran")
    return None
