"""How times are read: what every stopwatch offers, and that of a CPU.

What is read, and in which order, is `timing.time_functions`' affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from rooflab.bench.records.environment import last_level_cache_bytes
from rooflab.bench.timing import tamper
from rooflab.bench.timing.flush import Flush, FlushBy
from rooflab.bench.timing.pinning import pinned_threads

Function = Callable[[], object]
Call = tuple[str, Function, int]
"""Name, function, and how often it is called within one sample."""

TIMERS: Mapping[str, tuple[str, ...]] = {"cpu": ("perf_counter",), "cuda": ("events", "graph", "cupti")}
"""Timing methods by device type, the default first.

`events` is CUDA's default: it needs no capture, so that every function can be timed, and adds nothing of its own to
what the device does, as a profiler may.  What the others are for is in their modules.
"""
COARSE_STEP_S = 1.024e-6
"""Grid of event times taken where no two readings differ: the coarsest that is published for these cards."""
ROUNDING_S = 1e-9
"""Differences below it are the rounding of event times, which come as fp32 milliseconds."""


class Stopwatch(Protocol):
    """How one kind of device reads times."""

    batches: bool
    """Whether several calls may share a sample where one is too short for the clock."""
    rounds_at_once: int
    """How many rounds are best read together."""

    def rounds(self, orders: Sequence[Sequence[Call]]) -> list[dict[str, float]]:
        """For each order every function once, in that order; seconds of all calls of its sample together."""

    def sampling(self) -> AbstractContextManager[None]:
        """Held while samples are taken, after the warm-up; only in it does the observer look."""

    def step_s(self, readings: Sequence[float]) -> float:
        """The timer's resolution in seconds."""

    def launch_floor_s(self, calls: int) -> float | None:
        """What this method reads per call of a kernel that does nothing, `calls` to a sample; None on a CPU."""

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""

    def details(self, name: str, samples: int) -> dict[str, Any]:
        """Other fields of `timing.Samples` for the last `samples` samples of `name`."""


class OneByOne:
    """What a stopwatch inherits that reads one round at a time and knows nothing beside its readings."""

    rounds_at_once = 1
    _observe: Callable[[], None] | None = None
    _sampling = False

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order."""
        raise AssertionError("a stopwatch has a round of its own")

    def rounds(self, orders: Sequence[Sequence[Call]]) -> list[dict[str, float]]:
        """Each round in turn."""
        return [self.round(calls) for calls in orders]

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Lets the observer look: the clock of a warm-up, or of empty kernels, is not the one of the samples."""
        self._sampling = True
        try:
            yield
        finally:
            self._sampling = False

    def observer(self) -> Callable[[], None] | None:
        """What looks at the device now; None outside `sampling`."""
        return self._observe if self._sampling else None

    def launch_floor_s(self, calls: int) -> float | None:
        """Not known."""
        return None

    def details(self, name: str, samples: int) -> dict[str, Any]:
        """Nothing."""
        return {}


def check_timer(timer: str | None, device_type: str) -> str:
    """The timing method for a device type: `timer`, or the default of `TIMERS`.

    Raises `ValueError` on one that the device has not got, and on a device that is neither cpu nor cuda.
    """
    if device_type not in TIMERS:
        raise ValueError(f"device: expected cpu or cuda, got {device_type}")
    if timer is not None and timer not in TIMERS[device_type]:
        needs = ", which needs a CUDA device" if timer in TIMERS["cuda"] else ""
        raise ValueError(
            f"timer: expected one of {', '.join(TIMERS[device_type])} on {device_type}, got {timer}{needs}"
        )
    return timer or TIMERS[device_type][0]


def stopwatch_for(
    device: torch.device,
    cold: bool,
    observe: Callable[[], None] | None,
    timer: str | None = None,
    flush: FlushBy = "read",
) -> Stopwatch:
    """The stopwatch of a device and method.  Raises `ValueError` as `check_timer` does."""
    method = check_timer(timer, device.type)
    if method == "perf_counter":
        return CpuStopwatch(cold, observe, flush=flush)
    if method == "graph":
        from rooflab.bench.timing.cuda_graph import GraphStopwatch

        return GraphStopwatch(device, cold, observe, flush)
    if method == "cupti":
        from rooflab.bench.timing.cupti import CuptiStopwatch

        return CuptiStopwatch(device, cold, observe, flush)
    from rooflab.bench.timing.cuda_events import EventStopwatch

    return EventStopwatch(device, cold, observe, flush)


def grid_of(readings: Sequence[float]) -> float | None:
    """The least difference between readings that is no rounding; None where all are one."""
    distinct = sorted(set(readings))
    differences = (b - a for a, b in zip(distinct, distinct[1:], strict=False))
    return min((difference for difference in differences if difference > ROUNDING_S), default=None)


class CpuStopwatch(OneByOne):
    """Reads `perf_counter` around synchronous calls, torch's threads each held on one processor."""

    batches = True

    def __init__(
        self,
        cold: bool = True,
        observe: Callable[[], None] | None = None,
        clock: Callable[[], float] = tamper.perf_counter,
        flush: FlushBy = "read",
        pinned: Callable[[], AbstractContextManager[str]] = pinned_threads,
    ):
        self._observe = observe
        self._clock = clock
        self._flush = Flush("cpu", last_level_cache_bytes() if cold else 0, flush)
        self._step = min(_steps(clock, 1000))
        self._pinned = pinned
        self._threads = ""

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order."""
        read = {}
        for name, function, count in calls:
            self._flush()
            began = self._clock()
            for _ in range(count):
                function()
            read[name] = self._clock() - began
        if observe := self.observer():
            observe()
        return read

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Pins the threads: after the warm-up, in which libraries start theirs, and these must not start pinned."""
        with super().sampling(), self._pinned() as note:
            self._threads = f", {note}"
            yield

    def step_s(self, readings: Sequence[float]) -> float:
        """The smallest difference that the clock was seen to make."""
        return self._step

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""
        batch = f", {calls} calls per sample" if calls > 1 else ""
        return f"cpu perf_counter{self._threads}{self._flush.note}{batch}"


def _steps(clock: Callable[[], float], count: int) -> Iterator[float]:
    for _ in range(count):
        began = now = clock()
        while now <= began:
            now = clock()
        yield now - began
