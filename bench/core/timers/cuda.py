"""The timer of a GPU, by CUDA events.

A kernel of a few microseconds ends before the host has launched the next one, so a pair of events would time the host.
Therefore each sample is enqueued behind a wait on the device, of a thread that counts cycles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core.timers import Call, Flush, Function, Timer, bound, grid_of

_cuda: Any = torch.cuda
"""Untyped, because torch leaves events largely without annotations."""


class Torch:
    """The functions of torch's CUDA that the timer uses, as they were at import."""

    Event, current_stream, synchronize, sleep = map(
        staticmethod, bound("torch.cuda", "Event current_stream synchronize _sleep")
    )
    record, query, elapsed_time = map(staticmethod, bound("torch.cuda.Event", "record query elapsed_time"))


MIN_BACKLOG_S, MAX_BACKLOG_S = 1e-4, 0.02
"""Shortest and longest wait before a sample; a function with longer host work is taken to wait for the device."""
SAFETY = 2.0
"""Ratio of the wait to the longest host time of the last samples."""
REMEMBERED = 8
"""Number of last samples whose host time sets the wait; an outlier has no effect after this many samples."""
CALIBRATION_CYCLES = 2_000_000
WAKE_UP_S = 0.05
"""Work after which an idle card's clock has risen."""
FLOOR_READINGS = 15
GRID = tuple(1000 + 40 * turn for turn in range(64))
"""Cycles of waits whose lengths differ by more than the coarsest grid, so that at least two readings differ."""
COARSE_STEP_S = 1.024e-6
"""Step of event times, assumed where no two readings differ: the coarsest published for these cards."""


class CudaCalls:
    """One CUDA device, as the timers use it, all on its current stream; tests replace it by Python code."""

    def __init__(self, device: torch.device):
        self.device = device

    def clock(self) -> float:
        """The host's time in seconds."""
        return time.perf_counter()

    def use(self) -> AbstractContextManager[object]:
        """Makes the device the current one, inside `with`."""
        context: AbstractContextManager[object] = _cuda.device(self.device)
        return context

    def l2_bytes(self) -> int:
        return int(_cuda.get_device_properties(self.device).L2_cache_size)

    def event(self) -> torch.cuda.Event:
        """A new event with its time, recorded now."""
        event = cast(torch.cuda.Event, Torch.Event(enable_timing=True))
        Torch.record(event, Torch.current_stream(self.device))
        return event

    def passed(self, event: torch.cuda.Event) -> bool:
        """Whether the device has reached `event`."""
        return bool(Torch.query(event))

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events that the device has reached."""
        return cast(float, Torch.elapsed_time(start, end)) * 1e-3

    def sleep(self, cycles: int) -> None:
        """Enqueues one thread that counts `cycles` of the SM clock; with 0 it is an empty kernel."""
        Torch.sleep(cycles)

    def synchronize(self) -> None:
        Torch.synchronize(self.device)


class EventTimer(Timer):
    """Reads pairs of CUDA events, enqueued behind a wait on the device; each wait is as long as its function needs."""

    def __init__(self, cuda: CudaCalls, cold: bool = True, flush: str = "read"):
        self.cuda = cuda
        self.gaps: set[str] = set()
        """Functions that wait for the device inside, so that no wait of ours can hide the gaps between launches."""
        self._host: dict[str, deque[float]] = {}
        self._floors: dict[int, float] = {}
        with cuda.use():
            self.flush = Flush(cuda.device, cuda.l2_bytes() if cold else 0, flush)
            self.cycles_per_s = self._calibrate()
            """Cycles per second of the clock that the wait counts."""
            self._grid = self._read_grid()

    def _calibrate(self) -> float:
        """Cycles per second, read after work, because an idle card's clock is low."""
        rates: list[float] = []
        worked_s = 0.0
        while len(rates) < 3 or worked_s < WAKE_UP_S:
            start = self.cuda.event()
            self.cuda.sleep(CALIBRATION_CYCLES)
            end = self.cuda.event()
            self.cuda.synchronize()
            took = self.cuda.seconds(start, end)
            worked_s += took
            rates.append(CALIBRATION_CYCLES / took)
        return max(rates[-3:])

    def _read_grid(self) -> float | None:
        """The step of event times, read from waits of slowly increasing length."""
        pairs = []
        self.cuda.sleep(int(MAX_BACKLOG_S * self.cycles_per_s))
        for cycles in GRID:
            start = self.cuda.event()
            self.cuda.sleep(cycles)
            pairs.append((start, self.cuda.event()))
        self.cuda.synchronize()
        return grid_of([self.cuda.seconds(start, end) for start, end in pairs])

    def wait_s(self, name: str) -> float:
        """The length of the next wait."""
        return min(max(SAFETY * max(self._host.get(name, (0.0,))), MIN_BACKLOG_S), MAX_BACKLOG_S)

    def _enqueue(self, call: Call) -> tuple[bool, tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Enqueues a sample behind a wait; whether the wait was long enough, and the events around the sample's calls.

        A function that waits for the device inside gets no wait.
        """
        name = call[0]
        if name in self.gaps:
            return True, self._sample(call)
        wait_s = self.wait_s(name)
        began = self.cuda.clock()
        self.cuda.sleep(int(wait_s * self.cycles_per_s))
        released = self.cuda.event()
        events = self._sample(call)
        late = self.cuda.passed(released)
        took = self.cuda.clock() - began
        # A wait that ran out although it was long enough by this clock was shorter than it was meant to be.
        self._host.setdefault(name, deque(maxlen=REMEMBERED)).append(max(took, wait_s) if late else took)
        if late and wait_s >= MAX_BACKLOG_S:
            self.gaps.add(name)
        return not late or name in self.gaps, events

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        """Reads every function once, in this order; a function whose wait ran out is read again."""
        read: dict[str, float] = {}
        pending = list(calls)
        with self.cuda.use():
            while pending:
                taken = {call[0]: self._enqueue(call) for call in pending}
                if observe:
                    observe()
                self.cuda.synchronize()
                read |= {name: self.cuda.seconds(*events) for name, (_, events) in taken.items()}
                pending = [call for call in pending if not taken[call[0]][0]]
                observe = None
        return {name: read[name] for name, _, _ in calls}

    def _sample(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueues the flush and the calls; the events before and after the calls."""
        self.flush()
        start = self.cuda.event()
        for _ in range(call[2]):
            call[1]()
        return start, self.cuda.event()

    def first_call(self, function: Function) -> None:
        with self.cuda.use():
            function()
            self.cuda.synchronize()

    def step_s(self, readings: Sequence[float]) -> float:
        """The smallest difference between two readings, now or when the step was read; it differs between cards."""
        steps = [step for step in (grid_of(readings), self._grid) if step is not None]
        return min(steps, default=COARSE_STEP_S)

    def launch_floor_s(self, calls: int) -> float | None:
        """The minimum of several readings of an empty kernel, per call, with `calls` per sample."""
        if calls not in self._floors:
            name = f"an empty kernel, {calls} to a sample"
            empty = (name, lambda: self.cuda.sleep(0), calls)
            self._floors[calls] = min(self.round([empty])[name] for _ in range(FLOOR_READINGS)) / calls
        return self._floors[calls]

    def method(self, name: str) -> str:
        gaps = "included" if name in self.gaps else "hidden"
        return f"cuda events, launch gaps {gaps}{self.flush.note}"
