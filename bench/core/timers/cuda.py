"""Implements the timer of a GPU, with CUDA events.

A short kernel ends before the host has launched the next kernel, so two events would measure host time.  Therefore each
sample is enqueued behind a wait: a kernel of one thread that counts cycles.
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
"""`torch.cuda` without types, because torch does not annotate most of its events."""


class Torch:
    """Holds the functions of `torch.cuda` that the timer uses, as they were at import."""

    Event, current_stream, synchronize, sleep = map(
        staticmethod, bound("torch.cuda", "Event current_stream synchronize _sleep")
    )
    record, query, elapsed_time = map(staticmethod, bound("torch.cuda.Event", "record query elapsed_time"))


MIN_BACKLOG_S, MAX_BACKLOG_S = 1e-4, 0.02
"""The shortest and the longest wait before a sample.  A function that needs more is assumed to wait for the device."""
WAIT_TO_HOST_RATIO = 2.0
"""The wait divided by the longest host time of the last samples."""
HOST_TIME_COUNT = 8
"""The host times of this many last samples set the wait.  After so many samples an outlier has no effect."""
CALIBRATION_CYCLES = 2_000_000
WAKE_UP_S = 0.05
"""Seconds of work after which the clock of an idle card has risen."""
FLOOR_READING_COUNT = 15
WAIT_CYCLES = tuple(1000 + 40 * turn for turn in range(64))
"""Cycles of several waits.  The waits differ by more than the coarsest step of event times, so readings must differ."""
DEFAULT_CLOCK_STEP_S = 1.024e-6
"""The step of event times that is assumed if all readings are equal: the coarsest published step of these cards."""


class CudaCalls:
    """Provides the operations of a CUDA device for the timers, on the current stream.  Tests replace this class."""

    def __init__(self, device: torch.device):
        self.device = device

    def clock(self) -> float:
        """Returns the host's time in seconds."""
        return time.perf_counter()

    def use(self) -> AbstractContextManager[object]:
        """Makes this device the current CUDA device inside `with`."""
        device_context: AbstractContextManager[object] = _cuda.device(self.device)
        return device_context

    def l2_bytes(self) -> int:
        return int(_cuda.get_device_properties(self.device).L2_cache_size)

    def event(self) -> torch.cuda.Event:
        """Records a new CUDA event with timing enabled, and returns the event."""
        event = cast(torch.cuda.Event, Torch.Event(enable_timing=True))
        Torch.record(event, Torch.current_stream(self.device))
        return event

    def passed(self, event: torch.cuda.Event) -> bool:
        """Returns whether the device has reached `event`."""
        return bool(Torch.query(event))

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the seconds between two events that the device has reached."""
        return cast(float, Torch.elapsed_time(start, end)) * 1e-3

    def sleep(self, cycles: int) -> None:
        """Enqueues a kernel of one thread that counts `cycles` of the SM clock; with 0 cycles the kernel is empty."""
        Torch.sleep(cycles)

    def synchronize(self) -> None:
        Torch.synchronize(self.device)


class EventTimer(Timer):
    """Times functions with pairs of CUDA events.  Each sample is enqueued behind a wait on the device."""

    def __init__(self, cuda: CudaCalls, cold: bool = True, flush: str = "read"):
        self.cuda = cuda
        self.gaps: set[str] = set()
        """Names of functions that wait for the device themselves.  No wait can hide the gaps between their launches."""
        self._host: dict[str, deque[float]] = {}
        self._floors: dict[int, float] = {}
        with cuda.use():
            self.flush = Flush(cuda.device, cuda.l2_bytes() if cold else 0, flush)
            self.cycles_per_s = self._calibrate()
            """The frequency of the clock whose cycles a wait counts."""
            self._grid = self._read_grid()

    def _calibrate(self) -> float:
        """Measures the SM clock in cycles per second. An idle GPU has a low clock, so it first runs some work."""
        clock_rates: list[float] = []
        total_work_s = 0.0
        while len(clock_rates) < 3 or total_work_s < WAKE_UP_S:
            start_event = self.cuda.event()
            self.cuda.sleep(CALIBRATION_CYCLES)
            end_event = self.cuda.event()
            self.cuda.synchronize()
            work_s = self.cuda.seconds(start_event, end_event)
            total_work_s += work_s
            clock_rates.append(CALIBRATION_CYCLES / work_s)
        return max(clock_rates[-3:])

    def _read_grid(self) -> float | None:
        """Measures the resolution of CUDA event times, in seconds.  For this, the GPU counts slightly different numbers
        of clock cycles between two events.  Returns None if the times show no resolution."""
        event_pairs = []
        self.cuda.sleep(int(MAX_BACKLOG_S * self.cycles_per_s))
        for cycles in WAIT_CYCLES:
            start_event = self.cuda.event()
            self.cuda.sleep(cycles)
            event_pairs.append((start_event, self.cuda.event()))
        self.cuda.synchronize()
        return grid_of([self.cuda.seconds(start_event, end_event) for start_event, end_event in event_pairs])

    def wait_s(self, name: str) -> float:
        """Returns the length in seconds of the wait before the next sample of the function `name`."""
        return min(max(WAIT_TO_HOST_RATIO * max(self._host.get(name, (0.0,))), MIN_BACKLOG_S), MAX_BACKLOG_S)

    def _enqueue(self, call: Call) -> tuple[bool, tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Enqueues a GPU wait, then a timed sample. Returns whether the wait was long enough, and the sample's events.

        A function that itself waits for the GPU gets no wait before it."""
        name = call[0]
        if name in self.gaps:
            return True, self._sample(call)
        wait_s = self.wait_s(name)
        start_s = self.cuda.clock()
        self.cuda.sleep(int(wait_s * self.cycles_per_s))
        wait_end_event = self.cuda.event()
        event_pair = self._sample(call)
        wait_ended = self.cuda.passed(wait_end_event)
        host_s = self.cuda.clock() - start_s
        # A wait that ran out although it was long enough by this clock was shorter than it was meant to be.
        self._host.setdefault(name, deque(maxlen=HOST_TIME_COUNT)).append(max(host_s, wait_s) if wait_ended else host_s)
        if wait_ended and wait_s >= MAX_BACKLOG_S:
            self.gaps.add(name)
        return not wait_ended or name in self.gaps, event_pair

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        """Takes one sample of every function in `calls`, in order.  Returns the seconds by name.

        The GPU waits before each sample, while the host enqueues the launches.  If this wait ends before the host has
        enqueued them all, the sample is repeated."""
        seconds_by_name: dict[str, float] = {}
        pending_calls = list(calls)
        with self.cuda.use():
            while pending_calls:
                samples = {pending_call[0]: self._enqueue(pending_call) for pending_call in pending_calls}
                if observe:
                    observe()
                self.cuda.synchronize()
                seconds_by_name |= {name: self.cuda.seconds(*event_pair) for name, (_, event_pair) in samples.items()}
                pending_calls = [pending_call for pending_call in pending_calls if not samples[pending_call[0]][0]]
                observe = None
        return {name: seconds_by_name[name] for name, _, _ in calls}

    def _sample(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueues a cache flush, then the timed calls. Returns the events before and after the calls."""
        self.flush()
        start_event = self.cuda.event()
        for _ in range(call[2]):
            call[1]()
        return start_event, self.cuda.event()

    def first_call(self, function: Function) -> None:
        with self.cuda.use():
            function()
            self.cuda.synchronize()

    def step_s(self, readings: Sequence[float]) -> float:
        """Returns the smallest observed difference between event times, in seconds.  This step depends on the GPU."""
        clock_steps = [clock_step for clock_step in (grid_of(readings), self._grid) if clock_step is not None]
        return min(clock_steps, default=DEFAULT_CLOCK_STEP_S)

    def launch_floor_s(self, calls: int) -> float | None:
        """Returns the seconds per call of an empty kernel: the minimum of several samples of `calls` calls."""
        if calls not in self._floors:
            name = f"an empty kernel, {calls} to a sample"
            empty_call = (name, lambda: self.cuda.sleep(0), calls)
            self._floors[calls] = min(self.round([empty_call])[name] for _ in range(FLOOR_READING_COUNT)) / calls
        return self._floors[calls]

    def method(self, name: str) -> str:
        gap_text = "included" if name in self.gaps else "hidden"
        return f"cuda events, launch gaps {gap_text}{self.flush.note}"
