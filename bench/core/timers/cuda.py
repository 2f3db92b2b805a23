"""CUDA events behind a backlog, the default timer of a GPU, and CUDA graphs' replay.

A kernel of a few microseconds ends before the host has launched the next one, so a pair of events would time the host.
Therefore each sample is enqueued behind a wait on the device (a thread that counts cycles) that outlasts the host's
work.  When the wait ends, the flush, the events and the launches are all enqueued, and they run back to back.

The stopwatches use CUDA only through `CudaCalls`, so that tests can replace the device by Python code.  `CudaCalls`
calls the functions that torch had when the bench was imported.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rooflab.bench.core.timers import tamper
from rooflab.bench.core.timers.stopwatch import COARSE_STEP_S, Call, Flush, FlushBy, Function, Stopwatch, grid_of

_cuda: Any = torch.cuda
"""Untyped, because torch leaves events, streams and graphs largely without annotations."""
_Event, _Stream, _Graph = _cuda.Event, _cuda.Stream, _cuda.CUDAGraph
_record, _query, _elapsed_time = _Event.record, _Event.query, _Event.elapsed_time
_synchronize, _current_stream, _in_stream, _sleep = (
    _cuda.synchronize,
    _cuda.current_stream,
    _cuda.stream,
    _cuda._sleep,
)
_current_device, _new_pool = _cuda.current_device, _cuda.graph_pool_handle
_capture_begin, _capture_end, _replay = _Graph.capture_begin, _Graph.capture_end, _Graph.replay
# Of `torch.cuda.memory`, which has them from 2.8 on, and a build without CUDA stand-ins for them.
_end_allocations, _release_pool = _cuda.memory._cuda_endAllocateToPool, _cuda.memory._cuda_releasePool
_sides: dict[int, Any] = {}
"""One stream per device for warm-ups and captures: libraries keep one workspace for each stream they use."""
_broken: list[Any] = []
"""Graphs whose capture failed.  torch's pinned-memory allocator keeps querying these graphs, and no Python call stops
it; so they must not be freed."""
WARM_UPS = 3
"""Calls on the capturing stream before a capture, in which libraries make their handles and workspaces."""
EMPTY = "CUDA Graph is empty"
"""Torch's warning for an empty capture (`CUDAGraph.capture_end`)."""


class NotCaptured(Exception):
    """A function cannot be captured in a CUDA graph; the text is the reason."""


class CudaCalls:
    """One CUDA device, as the stopwatches use it: all on its current stream."""

    def __init__(self, device: torch.device):
        self._device = device

    def use(self) -> AbstractContextManager[Any]:
        """Makes the device the current one, inside `with`."""
        context: AbstractContextManager[Any] = _cuda.device(self._device)
        return context

    def l2_bytes(self) -> int:
        return int(_cuda.get_device_properties(self._device).L2_cache_size)

    def event(self) -> Any:
        """A new event with its time, recorded now."""
        event = _Event(enable_timing=True)
        _record(event, _current_stream(self._device))
        return event

    def passed(self, event: Any) -> bool:
        """Whether the device has reached `event`."""
        return bool(_query(event))

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two events that the device has reached."""
        return float(_elapsed_time(start, end)) * 1e-3

    def sleep(self, cycles: int) -> None:
        """Enqueues one thread that counts `cycles` of the SM clock; with 0 it is an empty kernel."""
        _sleep(cycles)

    def synchronize(self) -> None:
        _synchronize(self._device)

    def capture(self, function: Callable[[], object], calls: int) -> Callable[[], None]:
        """Captures `calls` calls of `function` and returns their replay.  Raises `NotCaptured` where capture fails.

        After a failure the stream is restored, which torch's own context manager does not do.
        """
        graph, side, pool = _Graph(), self._side_stream(), _new_pool()
        _synchronize(self._device)
        problem: RuntimeError | None = None
        with _in_stream(side), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # Captures this thread only; other threads may use CUDA meanwhile.
            _capture_begin(graph, pool=pool, capture_error_mode="thread_local")
            try:
                for _ in range(calls):
                    function()
            except RuntimeError as error:
                problem = error
            finally:
                try:
                    _capture_end(graph)
                except RuntimeError as error:
                    problem = problem or error
                    self._mend(graph, pool)
        _synchronize(self._device)
        if isinstance(problem, torch.cuda.OutOfMemoryError):
            raise problem
        if problem is not None:
            with contextlib.suppress(RuntimeError):
                graph.reset()
            raise NotCaptured(first_line(problem)) from problem
        if any(EMPTY in str(warning.message) for warning in warned):
            raise NotCaptured("it enqueued nothing on the current stream")
        return lambda: _replay(graph)

    def _mend(self, graph: Any, pool: Any) -> None:
        """Cleans up after a capture that torch could not end; without this, later work would fail.

        Allocations would still come from the graph's pool.  Before torch 2.13 the default generator would also refuse
        every draw as `outside graph capture` until a later capture succeeds, so this captures an empty kernel.
        """
        _broken.append(graph)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        with contextlib.suppress(RuntimeError):  # what fails after the end of the allocations has ended them
            _end_allocations(self._index(), pool)
            _release_pool(self._index(), pool)
        with contextlib.suppress(RuntimeError):  # on a device that is lost, where the next call says so
            empty = _Graph()
            _capture_begin(empty, pool=_new_pool(), capture_error_mode="thread_local")
            _sleep(0)
            _capture_end(empty)

    def _index(self) -> int:
        return int(_current_device()) if self._device.index is None else self._device.index

    def _side_stream(self) -> Any:
        index = self._index()
        if index not in _sides:
            _sides[index] = _Stream(self._device)
        return _sides[index]

    def warm_up(self, function: Callable[[], object]) -> None:
        side = self._side_stream()
        _synchronize(self._device)
        with _in_stream(side):
            for _ in range(WARM_UPS):
                function()
        _synchronize(self._device)


def first_line(error: BaseException) -> str:
    """The first non-blank line of an error's text; CUDA's errors continue with advice."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


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
GRID_READINGS, GRID_CYCLES = 64, 40
"""Together longer than the coarsest grid, so that at least two readings differ."""


class Backlog:
    """Waits on the device before each sample; each wait is as long as its function needs."""

    def __init__(self, cuda: CudaCalls, clock: Callable[[], float]):
        self._cuda = cuda
        self._clock = clock
        self._host: dict[str, deque[float]] = {}
        self.waiting: set[str] = set()
        """Functions that wait for the device inside, so that no backlog can hide their launches."""
        self._cycles_per_s = self._calibrate()

    def _calibrate(self) -> float:
        """Cycles per second of the clock that the wait counts, read after work, because an idle card's clock is low."""
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
        self._cuda.sleep(int(seconds * self._cycles_per_s))

    def length_s(self, name: str) -> float:
        longest = max(self._host.get(name, (0.0,)))
        return min(max(SAFETY * longest, MIN_BACKLOG_S), MAX_BACKLOG_S)

    def enqueue(
        self, name: str, sample: Callable[[], None], ours: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> bool:
        """Enqueues `sample` behind a wait; returns whether the wait was long enough, and True for a waiting function.

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


class EventStopwatch(Stopwatch):
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
        """The step of event times, read from waits of slowly increasing length."""
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
        """Reads every function once, in this order; a function whose wait ran out is read again."""
        read: dict[str, float] = {}
        with self.cuda.use():
            for name, function, _ in calls:
                self.compile(name, function)
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
        with self.cuda.use():
            function()
            self.cuda.synchronize()
        self._compiled.add(name)

    def compile(self, name: str, function: Function) -> None:
        """The first call of a function that had none: it may compile, which takes longer than any wait."""
        if name not in self._compiled:
            EventStopwatch.first_call(self, name, function)

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
        """The smallest difference between two readings, now or when the step was read; it differs between cards."""
        found = [step for step in (grid_of(readings), self._grid) if step is not None]
        return min(found, default=COARSE_STEP_S)

    def launch_floor_s(self, calls: int) -> float | None:
        """The minimum of several readings of an empty kernel, per call, with `calls` per sample."""
        if calls not in self._floors:
            name = f"an empty kernel, {calls} to a sample"
            empty = (name, lambda: self.cuda.sleep(0), calls)
            readings = (read[name] for read in self.rounds([[empty]] * FLOOR_READINGS))
            self._floors[calls] = min(readings, default=math.nan) / calls
        return self._floors[calls]

    def method(self, name: str, calls: int) -> str:
        gaps = "included" if name in self.backlog.waiting else "hidden"
        batch = f", {calls} calls per sample" if calls > 1 else ""
        return f"{self.title}, launch gaps {gaps}{self.flush.note}{batch}"


class GraphStopwatch(EventStopwatch):
    """Reads pairs of events around replays of captured graphs, enqueued behind a wait on the device.

    It times the work that an engine replays as a graph, without host time between launches.  One graph is captured
    for each set of inputs that a function takes in turn (`calls.Rotation.sets`), and samples replay them in turn; L2 is
    made cold in front of each replay, outside the pair of events.  Several calls in one sample are one graph of
    these calls.  The cost of a graph launch is the launch floor, read from a graph of one empty kernel.
    """

    title = "cuda graph replay"

    def __init__(self, *arguments: Any, **named: Any):
        self._graphs: dict[tuple[str, int], Function] = {}
        super().__init__(*arguments, **named)

    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order.

        Raises `ValueError` (`UNSUPPORTED: ...`) naming a function that cannot be captured: one that waits for the
        device, works on a stream that is not joined to the current one, or enqueues nothing there.
        """
        with self.cuda.use():
            replays = [(name, self._replay(name, function, count), 1) for name, function, count in calls]
        return super().round(replays)

    def first_call(self, name: str, function: Function) -> None:
        """Captures the function, and replays it once."""
        with self.cuda.use():
            replay = self._replay(name, function, 1)
        super().first_call(name, replay)

    def _replay(self, name: str, function: Function, count: int) -> Function:
        key = (name, count)
        if key not in self._graphs:
            self._graphs[key] = self._capture(name, function, count)
        return self._graphs[key]

    def _capture(self, name: str, function: Function, count: int) -> Function:
        sets = int(getattr(function, "sets", 1)) if count == 1 else 1
        try:
            self.cuda.warm_up(function)
            graphs: list[Callable[[], None]] = [self.cuda.capture(function, count) for _ in range(sets)]
        except NotCaptured as reason:
            raise ValueError(
                f"UNSUPPORTED: {name} cannot be captured in a CUDA graph ({reason}); time it with events"
            ) from reason
        turns = itertools.cycle(graphs)
        return lambda: next(turns)()
