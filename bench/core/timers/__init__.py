"""Defines the base class of the timers, and detects whether a kernel replaced a function that the benchmark uses.

In public contests, some kernels replaced `perf_counter` or an event's `elapsed_time`.  The timers call functions that
this file saved at import, so a replaced function does not change a time.  `tampered` reports replaced functions,
because such a kernel cannot be trusted.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch

from rooflab.bench.base.system_time import time as system
from rooflab.reference import compare

_torch_nn: Any = torch.nn.functional
_cuda: Any = torch.cuda
"""`torch.cuda` without types, because torch does not annotate most of it."""
_WATCHED_FUNCTIONS: tuple[tuple[str, Any, str], ...] = (
    ("time", time, "perf_counter perf_counter_ns monotonic monotonic_ns time time_ns process_time"),
    ("torch", torch, "sum equal allclose isclose isnan isfinite where empty full randn"),
    ("torch.Tensor", torch.Tensor, "__le__ le abs double float clone copy_ fill_"),
    ("torch.cuda", _cuda, "Event ExternalStream Stream _sleep current_stream default_stream stream synchronize"),
    ("torch.cuda.Event", _cuda.Event, "record query elapsed_time synchronize wait"),
    ("torch.cuda.Stream", _cuda.Stream, "synchronize wait_event wait_stream record_event"),
    ("torch.cuda.CUDAGraph", _cuda.CUDAGraph, "capture_begin capture_end replay"),
    ("torch.autograd.profiler", torch.autograd.profiler, "profile record_function"),
    ("torch.nn.functional", _torch_nn, " ".join(key for key in vars(_torch_nn) if callable(vars(_torch_nn)[key]))),
    ("numpy", np, "median percentile quantile sort mean"),
    ("rooflab.reference.compare", compare, "elementwise"),
)
"""Watched functions of timer, flush, comparison, and torch's library, whose times are compared with kernels' times."""
_SAVED_FUNCTIONS = {
    f"{place}.{name}": (owner, name, getattr(system if owner is time else owner, name))
    for place, owner, names in _WATCHED_FUNCTIONS
    for name in names.split()
    if hasattr(owner, name)  # a build of torch without CUDA lacks some
}
_TORCH_PATH = Path(torch.__file__).parent
LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library, because Python code cannot replace its clocks; None if the system is not Linux."""
MAX_CLOCK_GAP_S = 2.0
"""If two clocks differ by more seconds, one was replaced; a process may wait for a core between the two readings."""


def bound(place: str, names: str) -> list[Callable[..., object]]:
    """Returns functions of a module or class saved at import: `bound("torch.cuda.Event", "record query")` gives two."""
    return [_SAVED_FUNCTIONS[f"{place}.{name}"][2] for name in names.split()]


def tampered(threads: int | None = None) -> str | None:
    """Describes functions replaced since import (`time.perf_counter was replaced (mine.py:3)`), or returns None.

    `threads` is the expected number of torch's threads; another number is reported too.  Restores the saved functions
    and the number of threads, so that the next kernel is not blamed."""
    faults = []
    if threads is not None and (thread_count := torch.get_num_threads()) != threads:
        torch.set_num_threads(threads)
        faults.append(f"the number of torch's threads changed from {threads} to {thread_count}")
    for function_path, (owner, name, saved_function) in _SAVED_FUNCTIONS.items():
        current_fn = getattr(owner, name, None)
        is_builtin = owner is time and isinstance(current_fn, BuiltinFunctionType) and current_fn.__name__ == name
        code = getattr(current_fn, "__code__", None)
        is_foreign = owner is _cuda.Event and code is not None and _TORCH_PATH not in Path(code.co_filename).parents
        if is_foreign or (current_fn is not saved_function and not is_builtin):
            setattr(owner, name, saved_function)
            code_location = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
            faults.append(f"{function_path} was replaced{code_location}")
    clock_reading = (ctypes.c_long * 2)()
    # time-machine changes Python's own clocks from inside: only the system's time shows it.
    for name, clock_id in (("time", 0), ("perf_counter", 1)) if LIBC else ():
        LIBC.clock_gettime(clock_id, clock_reading)
        if (clock_gap_s := abs(getattr(time, name)() - clock_reading[0] - 1e-9 * clock_reading[1])) > MAX_CLOCK_GAP_S:
            faults.append(f"time.{name} was replaced: it is {clock_gap_s:.0f} s from the system's clock")
    return "; ".join(faults) or None


Function = Callable[[], object]
Call = tuple[str, Function, int]
"""A function to time: its name, the function, and the number of its calls in one sample."""
MAX_ROUNDING_S = 1e-9
"""A difference of event times below this is rounding, because event times are fp32 milliseconds."""


class Timer(ABC):
    """Measures times on one kind of device.  `timing.time_functions` decides which functions are timed, and when."""

    @abstractmethod
    def round(self, calls: Sequence[Call], observe: Function | None = None) -> dict[str, float]:
        """Takes one sample of every function in `calls`, in order.  Returns the seconds of each sample by function.

        `observe` is called once, for example to read the GPU's clocks.  On a GPU it is called while the device works.
        """

    def first_call(self, function: Function) -> None:
        """Calls a function without timing it, and waits for its end.  A first call may compile."""
        function()

    def sampling(self) -> AbstractContextManager[Callable[[], float | None]]:
        """Returns the context manager in which samples are taken, after the warm-up.

        It yields a function that returns how long the process's threads waited for a processor, divided by their run
        time. The function returns None on a GPU, or if the times are unknown."""
        return nullcontext(lambda: None)

    @abstractmethod
    def step_s(self, readings: Sequence[float]) -> float:
        """Returns the timer's resolution in seconds."""

    def launch_floor_s(self, calls: int) -> float | None:
        """Returns the seconds per call of an empty kernel, with `calls` calls per sample.  Returns None on a CPU."""
        return None

    @abstractmethod
    def method(self, name: str) -> str:
        """Returns the name of the method by which the function `name` was timed."""


def grid_of(readings: Sequence[float]) -> float | None:
    """Returns a clock's step: the smallest difference between two readings.  Skips differences that come from rounding.
    Returns None if no difference is left.  The readings lie on a grid with this step."""
    distinct_readings = sorted(set(readings))
    reading_gaps = (new_reading - old_reading for old_reading, new_reading in itertools.pairwise(distinct_readings))
    return min((reading_gap for reading_gap in reading_gaps if reading_gap > MAX_ROUNDING_S), default=None)


class Flush:
    """Empties a cache of `cache_bytes` on `device` when called.  If `cache_bytes` is 0, a call does nothing.

    A call reads a buffer, or writes it if `by` is `write`.  On some devices only writing empties the cache
    (`results/targets/flush.py` tests this).  Raises `ValueError` if `by` is neither `read` nor `write`.
    """

    def __init__(self, device: torch.device | str, cache_bytes: int, by: str = "read"):
        if by not in ("read", "write"):
            raise ValueError(f"flush: expected read or write, got {by!r}")
        # Of twice the cache's size.  Ones, because on a CPU all unwritten pages of zeros map to one physical page.
        self.buffer = torch.ones(2 * cache_bytes // 4, device=device)
        self.note = ", flushed by writing" if by == "write" and cache_bytes else ""
        """The text that the flush adds to the name of a timing method; empty for the default."""
        self.sink = torch.empty((), device=device)
        self._by = by

    def __call__(self) -> None:
        if not self.buffer.numel():
            return
        if self._by == "read":
            _torch_sum(self.buffer, dim=0, out=self.sink)
        else:
            _torch_fill(self.buffer, 1.0)


(_torch_sum,), (_torch_fill,) = bound("torch", "sum"), bound("torch.Tensor", "fill_")
