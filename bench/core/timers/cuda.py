"""The timers of a GPU by CUDA events, the default, and by the replay of CUDA graphs.

A kernel of a few microseconds ends before the host has launched the next one, so a pair of events would time the host.
Therefore each sample is enqueued behind a wait on the device, of a thread that counts cycles.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, cast

import torch

from rooflab.bench.base.plain import first_line
from rooflab.bench.base.system_time import time
from rooflab.bench.core.timers import Call, Flush, Function, Timer, bound, grid_of

_cuda: Any = torch.cuda
"""Untyped, because torch leaves events, streams and graphs largely without annotations."""


class Torch:
    """What the timers use of torch's CUDA, as it was at import."""

    Event, Stream, in_stream, current_stream, synchronize, sleep = map(
        staticmethod, bound("torch.cuda", "Event Stream stream current_stream synchronize _sleep")
    )
    record, query, elapsed_time = map(staticmethod, bound("torch.cuda.Event", "record query elapsed_time"))
    Graph = _cuda.CUDAGraph
    capture_begin, capture_end, replay = map(
        staticmethod, bound("torch.cuda.CUDAGraph", "capture_begin capture_end replay")
    )
    current_device, new_pool = map(staticmethod, (_cuda.current_device, _cuda.graph_pool_handle))
    # Of `torch.cuda.memory`, which has them from 2.8 on, and a build without CUDA stand-ins for them.
    end_allocations, release_pool = map(
        staticmethod, (_cuda.memory._cuda_endAllocateToPool, _cuda.memory._cuda_releasePool)
    )
    broken: ClassVar[list[Any]] = []
    """Graphs whose capture failed.  torch's pinned-memory allocator keeps querying these graphs, and no Python call
    stops it; so they must not be freed."""


WARM_UPS = 3
"""Calls on the capturing stream before a capture, in which libraries make their handles and workspaces."""
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
T = TypeVar("T")
"""What a sample returns."""


@cache
def side_stream(index: int) -> torch.cuda.Stream:
    """One stream per device for warm-ups and captures: libraries keep one workspace for each stream they use."""
    return cast(torch.cuda.Stream, Torch.Stream(index))


class NotCaptured(Exception):
    """A function cannot be captured in a CUDA graph; the text is the reason."""


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

    def capture(self, function: Callable[[], object], calls: int) -> Callable[[], None]:
        """Captures `calls` calls of `function` and returns their replay.  Raises `NotCaptured` where capture fails.

        After a failure the stream is restored, which torch's own context manager does not do.
        """
        graph, pool, errors = Torch.Graph(), Torch.new_pool(), list[RuntimeError]()
        Torch.synchronize(self.device)
        with self._on_side(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # Captures this thread only; other threads may use CUDA meanwhile.
            Torch.capture_begin(graph, pool=pool, capture_error_mode="thread_local")
            try:
                for _ in range(calls):
                    function()
            except RuntimeError as error:
                errors.append(error)
            finally:
                try:
                    Torch.capture_end(graph)
                except RuntimeError as error:
                    errors.append(error)
                    self._mend(graph, pool)
        Torch.synchronize(self.device)
        if errors:
            if isinstance(errors[0], torch.cuda.OutOfMemoryError):
                raise errors[0]
            with suppress(RuntimeError):
                graph.reset()
            raise NotCaptured(first_line(errors[0])) from errors[0]
        if any("CUDA Graph is empty" in str(warning.message) for warning in warned):  # as `CUDAGraph.capture_end` warns
            raise NotCaptured("it enqueued nothing on the current stream")
        return lambda: cast(None, Torch.replay(graph))

    def _mend(self, graph: torch.cuda.CUDAGraph, pool: object) -> None:
        """Cleans up after a capture that torch could not end; without this, later work would fail.

        Allocations would still come from the graph's pool.  Before torch 2.13 the default generator would also refuse
        every draw as `outside graph capture` until a later capture succeeds, so this captures an empty kernel.
        """
        Torch.broken.append(graph)
        with suppress(RuntimeError):
            graph.reset()
        with suppress(RuntimeError):  # what fails after the end of the allocations has ended them
            Torch.end_allocations(self._index(), pool)
            Torch.release_pool(self._index(), pool)
        with suppress(RuntimeError):  # on a device that is lost, where the next call says so
            empty = Torch.Graph()
            Torch.capture_begin(empty, pool=Torch.new_pool(), capture_error_mode="thread_local")
            Torch.sleep(0)
            Torch.capture_end(empty)

    def _on_side(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], Torch.in_stream(side_stream(self._index())))

    def _index(self) -> int:
        return int(Torch.current_device()) if self.device.index is None else self.device.index

    def warm_up(self, function: Callable[[], object]) -> None:
        Torch.synchronize(self.device)
        with self._on_side():
            for _ in range(WARM_UPS):
                function()
        Torch.synchronize(self.device)


class EventTimer(Timer):
    """Reads pairs of CUDA events, enqueued behind a wait on the device; each wait is as long as its function needs."""

    title = "cuda events"

    def __init__(self, cuda: CudaCalls, cold: bool = True, flush: str = "read"):
        self.cuda = cuda
        self.gaps: set[str] = set()
        """Functions that wait for the device inside, so that no wait of ours can hide the gaps between launches."""
        self._host: dict[str, deque[float]] = {}
        self._floors: dict[int, float] = {}
        with cuda.use():
            self.flush = Flush(cuda.device, cuda.l2_bytes() if cold else 0, flush)
            self.cycles_per_s = self._calibrate()
            """Of the clock that the wait counts."""
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

    def enqueue(
        self, name: str, sample: Callable[[], T], ours: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> tuple[bool, T]:
        """Enqueues `sample` behind a wait; whether the wait was long enough, and what `sample` returned.

        A function that waits for the device inside gets no wait.  The wait itself is enqueued inside `ours()`.
        """
        if name in self.gaps:
            return True, sample()
        wait_s = self.wait_s(name)
        began = self.cuda.clock()
        with ours():
            self.cuda.sleep(int(wait_s * self.cycles_per_s))
        released = self.cuda.event()
        result = sample()
        late = self.cuda.passed(released)
        took = self.cuda.clock() - began
        # A wait that ran out although it was long enough by this clock was shorter than it was meant to be.
        self._host.setdefault(name, deque(maxlen=REMEMBERED)).append(max(took, wait_s) if late else took)
        if late and wait_s >= MAX_BACKLOG_S:
            self.gaps.add(name)
        return not late or name in self.gaps, result

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        """Reads every function once, in this order; a function whose wait ran out is read again."""
        read: dict[str, float] = {}
        pending = list(calls)
        with self.cuda.use():
            while pending:
                taken = {call[0]: self.enqueue(call[0], partial(self._sample, call)) for call in pending}
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

    def first_call(self, name: str, function: Function) -> None:
        with self.cuda.use():
            function()
            self.cuda.synchronize()

    def step_s(self, readings: Sequence[float]) -> float:
        """The smallest difference between two readings, now or when the step was read; it differs between cards."""
        found = [step for step in (grid_of(readings), self._grid) if step is not None]
        return min(found, default=COARSE_STEP_S)

    def launch_floor_s(self, calls: int) -> float | None:
        """The minimum of several readings of an empty kernel, per call, with `calls` per sample."""
        if calls not in self._floors:
            name = f"an empty kernel, {calls} to a sample"
            empty = (name, lambda: self.cuda.sleep(0), calls)
            self._floors[calls] = min(read[name] for read in self.rounds([[empty]] * FLOOR_READINGS)) / calls
        return self._floors[calls]

    def method(self, name: str) -> str:
        gaps = "included" if name in self.gaps else "hidden"
        return f"{self.title}, launch gaps {gaps}{self.flush.note}"


class GraphTimer(EventTimer):
    """Reads pairs of events around replays of captured graphs, enqueued behind a wait on the device.

    It times the work that an engine replays as a graph, without host time between launches.  One graph is captured
    for each set of inputs that a function takes in turn (`calls.Rotation.sets`), and samples replay them in turn; L2 is
    made cold in front of each replay, outside the pair of events.  Several calls in one sample are one graph of
    these calls.  The cost of a graph launch is the launch floor, read from a graph of one empty kernel.
    """

    title = "cuda graph replay"

    def __init__(self, cuda: CudaCalls, cold: bool = True, flush: str = "read"):
        super().__init__(cuda, cold, flush)
        self._graphs: dict[tuple[str, int], Function] = {}

    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        """Reads every function once, in this order.

        Raises `ValueError` (`UNSUPPORTED: ...`) naming a function that cannot be captured: one that waits for the
        device, works on a stream that is not joined to the current one, or enqueues nothing there.
        """
        return super().round(
            [(name, self._replay(name, function, count), 1) for name, function, count in calls], observe
        )

    def first_call(self, name: str, function: Function) -> None:
        """Captures the function, and replays it once."""
        super().first_call(name, self._replay(name, function, 1))

    def _replay(self, name: str, function: Function, count: int) -> Function:
        """A replay of the next graph of `count` calls; the graphs are captured once."""
        if (name, count) not in self._graphs:
            sets = int(getattr(function, "sets", 1)) if count == 1 else 1
            try:
                with self.cuda.use():
                    self.cuda.warm_up(function)
                    turns = itertools.cycle([self.cuda.capture(function, count) for _ in range(sets)])
            except NotCaptured as reason:
                raise ValueError(
                    f"UNSUPPORTED: {name} cannot be captured in a CUDA graph ({reason}); time it with events"
                ) from reason
            self._graphs[name, count] = lambda: next(turns)()
        return self._graphs[name, count]
