"""CUDA events behind a backlog: the default timer of a GPU.

A kernel of a few microseconds is over before the host has launched the next, and a pair of events around it then reads
the host.  So each sample is enqueued behind a wait on the device (a thread that counts cycles) that outlasts the
host's work: the flush, the events and the launches are all there when it ends, and run back to back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from rooflab.bench.timing import tamper
from rooflab.bench.timing.cuda_calls import CudaCalls
from rooflab.bench.timing.flush import Flush, FlushBy
from rooflab.bench.timing.stopwatch import COARSE_STEP_S, Call, Function, OneByOne, grid_of

MIN_BACKLOG_S, MAX_BACKLOG_S = 1e-4, 0.02
"""Shortest and longest wait put in front of a sample; a function whose host work takes longer waits for the device."""
SAFETY = 2.0
"""The wait over the longest host time of the last samples."""
REMEMBERED = 8
"""Samples of a function whose host time sets its wait: one hiccup is forgotten after as many."""
CALIBRATION_CYCLES = 2_000_000
WAKE_UP_S = 0.05
"""Work after which an idle card's clock has risen."""
FLOOR_READINGS = 15
GRID_READINGS, GRID_CYCLES = 64, 40
"""Together longer than the coarsest grid, so that at least two readings differ."""


class Backlog:
    """Waits on the device, one in front of each sample, each as long as its function needs."""

    def __init__(self, cuda: CudaCalls, clock: Callable[[], float]):
        self._cuda = cuda
        self._clock = clock
        self._host: dict[str, deque[float]] = {}
        self.waiting: set[str] = set()
        """Functions that wait for the device inside, so that no backlog can hide their launches."""
        self._cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        """Cycles per second of the clock that the wait counts, of a card that is awake: an idle one is slow."""
        rates: list[float] = []
        worked_s = 0.0
        while len(rates) < 3 or worked_s < WAKE_UP_S:
            start = self._cuda.event()
            self._cuda.sleep(CALIBRATION_CYCLES)
            end = self._cuda.event()
            self._cuda.synchronize()
            took = self._cuda.seconds(start, end)
            worked_s += took
            rates.append(CALIBRATION_CYCLES / took)
        return max(rates[-3:])

    def wait(self, seconds: float) -> None:
        """Makes the device wait."""
        self._cuda.sleep(int(seconds * self._cycles_per_s))

    def length_s(self, name: str) -> float:
        """The next wait in front of `name`."""
        longest = max(self._host.get(name, (0.0,)))
        return min(max(SAFETY * longest, MIN_BACKLOG_S), MAX_BACKLOG_S)

    def enqueue(
        self,
        name: str,
        sample: Callable[[], None],
        ours: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> bool:
        """Enqueues `sample` behind a wait; whether the wait outlasted it, which for a waiting function is not asked.

        The wait itself is enqueued inside `ours()`.
        """
        if name in self.waiting:
            sample()
            return True
        length_s = self.length_s(name)
        began = self._clock()
        with ours():
            self.wait(length_s)
        released = self._cuda.event()
        sample()
        late = self._cuda.passed(released)
        took = self._clock() - began
        # A wait that ran out although it was long enough by this clock was shorter than it was meant to be.
        self._host.setdefault(name, deque(maxlen=REMEMBERED)).append(max(took, length_s) if late else took)
        if late and length_s >= MAX_BACKLOG_S:
            self.waiting.add(name)
            return True
        return not late


class EventStopwatch(OneByOne):
    """Reads pairs of CUDA events, enqueued behind a wait on the device."""

    batches = True
    title = "cuda events"

    def __init__(
        self,
        device: torch.device,
        cold: bool = True,
        observe: Callable[[], None] | None = None,
        flush: FlushBy = "read",
        cuda: CudaCalls | None = None,
        clock: Callable[[], float] = tamper.perf_counter,
    ):
        self.cuda = cuda or CudaCalls(device)
        self._observe = observe
        self._compiled: set[str] = set()
        self._floors: dict[int, float] = {}
        with self.cuda.use():
            self.flush = Flush(device, self.cuda.l2_bytes() if cold else 0, flush)
            self.backlog = Backlog(self.cuda, clock)
            self._grid = self._read_grid()

    def _read_grid(self) -> float | None:
        """The step of event times, from waits of which each is a little longer than the one before."""
        pairs = []
        self.backlog.wait(MAX_BACKLOG_S)
        for turn in range(GRID_READINGS):
            start = self.cuda.event()
            self.cuda.sleep(1000 + GRID_CYCLES * turn)
            pairs.append((start, self.cuda.event()))
        self.cuda.synchronize()
        readings = [self.cuda.seconds(start, end) for start, end in pairs]
        return grid_of(readings)

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order; one whose wait ran out again, until none did."""
        read: dict[str, float] = {}
        with self.cuda.use():
            for name, function, _ in calls:
                self.first_call(name, function)
            pending = list(calls)
            while pending:
                late = []
                events = {}
                for call in pending:
                    in_time, events[call[0]] = self._sample(call)
                    if not in_time:
                        late.append(call)
                if not read and (observe := self.observer()):
                    observe()
                self.cuda.synchronize()
                read |= {name: self.cuda.seconds(start, end) for name, (start, end) in events.items()}
                pending = late
        return {name: read[name] for name, _, _ in calls}

    def first_call(self, name: str, function: Function) -> None:
        """Calls a function that was not called before: it compiles then, which no wait outlasts."""
        if name not in self._compiled:
            function()
            self.cuda.synchronize()
            self._compiled.add(name)

    def _sample(self, call: Call) -> tuple[bool, tuple[object, object]]:
        name, function, count = call
        events: list[object] = []

        def enqueue() -> None:
            self.flush()
            events.append(self.cuda.event())
            for _ in range(count):
                function()
            events.append(self.cuda.event())

        in_time = self.backlog.enqueue(name, enqueue)
        return in_time, (events[0], events[1])

    def step_s(self, readings: Sequence[float]) -> float:
        """The least difference seen between two readings, here or when the grid was read: it differs between cards."""
        found = [step for step in (grid_of(readings), self._grid) if step is not None]
        return min(found, default=COARSE_STEP_S)

    def launch_floor_s(self, calls: int) -> float | None:
        """The least of several readings of an empty kernel, per call, with `calls` to a sample."""
        if calls not in self._floors:
            name = f"an empty kernel, {calls} to a sample"
            empty = (name, lambda: self.cuda.sleep(0), calls)
            readings = (read[name] for read in self.rounds([[empty]] * FLOOR_READINGS))
            self._floors[calls] = min(readings, default=math.nan) / calls
        return self._floors[calls]

    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""
        gaps = "included" if name in self.backlog.waiting else "hidden"
        batch = f", {calls} calls per sample" if calls > 1 else ""
        return f"{self.title}, launch gaps {gaps}{self.flush.note}{batch}"
