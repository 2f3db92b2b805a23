"""How times are read on a CPU and on CUDA.  What is read, and in which order, is `timing.time_functions`' affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from rooflab.bench.environment import last_level_cache_bytes

Function = Callable[[], object]
Call = tuple[str, Function, int]
"""Name, function, and how often it is called within one sample."""

COARSE_EVENT_STEP_S = 1.024e-6
"""Grid of event times taken where all readings are one: the coarsest that is published for these cards."""
MAX_BACKLOG_S = 0.02
"""Longest wait put in front of a launch; a function whose host work takes longer waits for the device inside."""

_cuda: Any = torch.cuda
"""Untyped, because torch leaves events and `_sleep` without annotations."""


class Stopwatch(Protocol):
    """How one kind of device reads times."""

    batches: bool
    """Whether several calls may share a sample where one is too short for the clock."""

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order; seconds of all calls of its sample together."""

    def step_s(self, readings: Sequence[float]) -> float:
        """The timer's resolution in seconds."""

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""


def stopwatch_for(device: torch.device, cold: bool, observe: Callable[[], None] | None) -> Stopwatch:
    """The stopwatch of a device.  Raises `ValueError` on a device that is neither a CPU nor CUDA."""
    if device.type == "cpu":
        return CpuStopwatch(cold, observe)
    if device.type == "cuda":
        return CudaStopwatch(device, cold, observe)
    raise ValueError(f"device: expected cpu or cuda, got {device.type}")


class CpuStopwatch:
    """Reads `perf_counter` around synchronous calls."""

    batches = True

    def __init__(
        self,
        cold: bool = True,
        observe: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._observe = observe
        self._clock = clock
        self._cold = cold
        # Ones, because pages of zeros that nothing has written to are all one page.
        self._flush = torch.ones(2 * last_level_cache_bytes() // 4 if cold else 0)
        self._step = min(_steps(clock, 1000))

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order."""
        read = {}
        for name, function, count in calls:
            if self._cold:
                self._flush.sum()
            began = self._clock()
            for _ in range(count):
                function()
            read[name] = self._clock() - began
        if self._observe is not None:
            self._observe()
        return read

    def step_s(self, readings: Sequence[float]) -> float:
        """The smallest difference that the clock was seen to make."""
        return self._step

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""
        return "cpu perf_counter" + (f", {calls} calls per sample" if calls > 1 else "")


def _steps(clock: Callable[[], float], count: int) -> Iterator[float]:
    for _ in range(count):
        began = now = clock()
        while now <= began:
            now = clock()
        yield now - began


class CudaStopwatch:
    """Reads pairs of CUDA events, enqueued behind a wait on the device."""

    batches = False

    def __init__(self, device: torch.device, cold: bool = True, observe: Callable[[], None] | None = None):
        self._device = device
        self._observe = observe
        self._cold = cold
        cache_bytes = _cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.ones(2 * cache_bytes // 4 if cold else 0, device=device)
        self._sink = torch.empty((), device=device)
        self._cycles_per_s = self._calibrate()
        self._backlog_s = 2e-4
        self._known: set[str] = set()
        self._waiting: set[str] = set()
        """Functions that wait for the device inside, so that no backlog can hide their launches."""

    def _calibrate(self) -> float:
        """Cycles per second of the clock that `torch.cuda._sleep` counts."""
        cycles = 10_000_000
        with _cuda.device(self._device):
            for _ in range(2):  # the first wakes the device
                start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
                start.record()
                _cuda._sleep(cycles)
                end.record()
                end.synchronize()
        return float(cycles / (start.elapsed_time(end) * 1e-3))

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order, until no wait ran out."""
        with _cuda.device(self._device):
            for name, function, _ in calls:
                if name not in self._known:
                    function()  # compiles, which no wait outlasts
                    _cuda.synchronize(self._device)
                    self._known.add(name)
            while True:
                read, late = self._attempt(calls)
                if not late:
                    return read
                if self._backlog_s >= MAX_BACKLOG_S:
                    self._waiting |= late
                    return read
                self._backlog_s = min(2 * self._backlog_s, MAX_BACKLOG_S)

    def _attempt(self, calls: Sequence[Call]) -> tuple[dict[str, float], set[str]]:
        """The readings, and the functions that the device had to wait for."""
        late = set()
        events: dict[str, tuple[Any, Any]] = {}
        for name, function, count in calls:
            released = _cuda.Event()
            start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
            if name not in self._waiting:
                _cuda._sleep(int(self._backlog_s * self._cycles_per_s))
            released.record()
            if self._cold:
                torch.sum(self._flush, dim=0, out=self._sink)
            start.record()
            for _ in range(count):
                function()
            end.record()
            if released.query() and name not in self._waiting:
                late.add(name)
            events[name] = (start, end)
        if self._observe is not None:
            self._observe()
        _cuda.synchronize(self._device)
        return {name: start.elapsed_time(end) * 1e-3 for name, (start, end) in events.items()}, late

    def step_s(self, readings: Sequence[float]) -> float:
        """The smallest difference between two readings: the grid of event times differs from card to card."""
        distinct = sorted(set(readings))
        return min((b - a for a, b in zip(distinct, distinct[1:], strict=False)), default=COARSE_EVENT_STEP_S)

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""
        return "cuda events, launch gaps " + ("included" if name in self._waiting else "hidden")
