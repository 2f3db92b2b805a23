"""The base class of the stopwatches, and the flush of the last-level cache before a sample.

`timing.time_functions` decides what is read and in which order.  A flush by reading leaves clean lines, which the next
kernel's data displaces at no cost.  A flush by writing leaves dirty lines, which are written back inside the timed
kernel; but no card guarantees that reading displaces everything.  So both flushes are implemented, and
`compare_flushes` of `results/bars/flush.py` measures which flush is cleaner on a card.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from rooflab.bench.core.timers import tamper

Function = Callable[[], object]
Call = tuple[str, Function, int]
"""Name, function, and how often it is called within one sample."""

COARSE_STEP_S = 1.024e-6
"""Step of event times, assumed where no two readings differ: the coarsest published for these cards."""
ROUNDING_S = 1e-9
"""Differences below it are the rounding of event times, which come as fp32 milliseconds."""


class Stopwatch(ABC):
    """How one kind of device reads times; by default one round at a time, without extra fields."""

    batches: bool
    """Whether several calls may share a sample where one is too short for the clock."""
    rounds_at_once = 1
    """How many rounds are best read together."""
    _observe: Callable[[], None] | None = None
    _sampling = False

    @abstractmethod
    def round(self, calls: Sequence[Call]) -> dict[str, float]:
        """Reads every function once, in this order; seconds of all calls of its sample together."""

    def rounds(self, orders: Sequence[Sequence[Call]]) -> list[dict[str, float]]:
        return [self.round(calls) for calls in orders]

    def first_call(self, name: str, function: Function) -> None:
        """Calls a function outside any reading, and waits until it has ended: a first call may compile."""
        function()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """The context in which samples are taken, after the warm-up; only inside it is the observer called.

        The clock during the warm-up or during empty kernels may differ from the clock during the samples.
        """
        self._sampling = True
        try:
            yield
        finally:
            self._sampling = False

    def observer(self) -> Callable[[], None] | None:
        """The observer to call now; None outside `sampling`."""
        return self._observe if self._sampling else None

    @abstractmethod
    def step_s(self, readings: Sequence[float]) -> float:
        """The timer's resolution in seconds."""

    def launch_floor_s(self, calls: int) -> float | None:
        """Time per call of an empty kernel by this method, with `calls` per sample; None on a CPU."""
        return None

    @abstractmethod
    def method(self, name: str, calls: int) -> str:
        """How `name` was timed."""

    def waiting(self) -> float | None:
        """Time that the process's threads have waited for a processor since `sampling` began, over the time that they
        ran; None where a device does the work, or if the system does not tell."""
        return None

    def details(self, name: str, samples: int) -> dict[str, Any]:
        """Other fields of `timing.Samples` for the last `samples` samples of `name`."""
        return {}


class FirstCall:
    """A function that notes its first call, and with `due` set the next one, for calls that are made before its timing.

    It costs time at each call, so it is not the function that is timed.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self.due = True
        self.first_call_s = 0.0
        """Seconds of the longest call that was noted."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self.due:
            return self._function(*args, **named)
        self.due = False
        began = tamper.perf_counter()
        result = self._function(*args, **named)
        self.first_call_s = max(self.first_call_s, tamper.perf_counter() - began)
        return result


def grid_of(readings: Sequence[float]) -> float | None:
    """The smallest difference between readings above rounding; None where all are equal."""
    distinct = sorted(set(readings))
    differences = (b - a for a, b in zip(distinct, distinct[1:], strict=False))
    return min((difference for difference in differences if difference > ROUNDING_S), default=None)


FlushBy = Literal["read", "write"]
TIMES_THE_CACHE = 2
"""Ratio of the buffer's size to the cache's size."""


class Flush:
    """Empties a cache of `cache_bytes` on `device` when called; of 0 bytes it does nothing.

    Raises `ValueError` on a way that is neither `read` nor `write`.
    """

    def __init__(self, device: torch.device | str, cache_bytes: int, by: FlushBy = "read"):
        if by not in get_args(FlushBy):
            raise ValueError(f"flush: expected one of {', '.join(get_args(FlushBy))}, got {by!r}")
        self.by = by
        # Ones, because on a CPU all unwritten pages of zeros map to one physical page.
        self._buffer = torch.ones(TIMES_THE_CACHE * cache_bytes // 4, device=device)
        self._sink = torch.empty((), device=device)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def note(self) -> str:
        """The flush's part of a timing method's name: empty for the default."""
        return ", flushed by writing" if self.by == "write" and self._buffer.numel() else ""

    def __call__(self) -> None:
        if not self._buffer.numel():
            return
        if self.by == "read":
            tamper.tensor_sum(self._buffer, dim=0, out=self._sink)
        else:
            tamper.tensor_fill(self._buffer, 1.0)
