"""The few calls into CUDA that timing makes, through the functions that torch had when the bench was imported.

The stopwatches see nothing else of CUDA, so that their tests run them on a device made of Python.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

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
"""By device the one stream of warm-ups and captures: libraries keep a workspace for each stream that they meet."""
_broken: list[Any] = []
"""Graphs whose capture failed.  torch's allocator of pinned memory goes on asking them whether it allocates for them,
and nothing that Python can call ends that; they must not be freed."""
WARM_UPS = 3
"""Calls on the capturing stream before a capture, in which libraries make their handles and workspaces."""
EMPTY = "CUDA Graph is empty"
"""How torch warns of a capture that caught nothing (`CUDAGraph.capture_end`)."""


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
        """Size of the L2 cache."""
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
        """Waits for all of the device's work."""
        _synchronize(self._device)

    def capture(self, function: Callable[[], object], calls: int) -> Callable[[], None]:
        """Replays `calls` calls of `function`, captured now.  Raises `NotCaptured` where they cannot be.

        The stream is left as it was also after a failure, which torch's own context manager does not do.
        """
        graph, side, pool = _Graph(), self._side_stream(), _new_pool()
        _synchronize(self._device)
        problem: RuntimeError | None = None
        with _in_stream(side), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # Of this thread alone: what others do meanwhile is theirs.
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
        """Does what torch leaves undone where a capture cannot be ended, which would break whatever comes next.

        Memory would go on being taken from the graph's pool, and before torch 2.13 the default generator would refuse
        every draw as one `outside graph capture`, until a later capture ends well: so one of an empty kernel does.
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
        """Calls `function` on the stream of the captures."""
        side = self._side_stream()
        _synchronize(self._device)
        with _in_stream(side):
            for _ in range(WARM_UPS):
                function()
        _synchronize(self._device)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; CUDA's go on with advice."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
