"""The functions under the timer and the judge: bound at import, and checked to be still those.

Kernels that replaced `perf_counter` or an event's `elapsed_time` have been submitted to public contests.  The
stopwatches call what is bound here, so a replaced function does not change a reading; `tampered` names it, because a
kernel that replaces one is not to be trusted.  Of the clocks it also names one that was replaced before this file was
imported; of other functions that is not seen.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch

from rooflab.bench.core.system_time import time as system
from rooflab.reference import compare

perf_counter = system.perf_counter
"""The host's clock."""
tensor_sum = torch.sum
"""What a flush by reading calls."""
tensor_fill = torch.Tensor.fill_
"""What a flush by writing calls."""

_library: Any = torch.nn.functional
_cuda: Any = torch.cuda
"""Untyped, because torch leaves most of it without annotations."""
_WATCHED: tuple[tuple[str, Any, str], ...] = (
    ("time", time, "perf_counter perf_counter_ns monotonic monotonic_ns time time_ns process_time"),
    ("torch", torch, "sum equal allclose isclose isnan isfinite where empty full randn"),
    ("torch.Tensor", torch.Tensor, "__le__ le abs double float clone copy_ fill_"),
    ("torch.cuda", _cuda, "Event ExternalStream Stream _sleep current_stream default_stream stream synchronize"),
    ("torch.cuda.Event", _cuda.Event, "record query elapsed_time synchronize wait"),
    ("torch.cuda.Stream", _cuda.Stream, "synchronize wait_event wait_stream record_event"),
    ("torch.cuda.CUDAGraph", _cuda.CUDAGraph, "capture_begin capture_end replay"),
    ("torch.autograd.profiler", torch.autograd.profiler, "profile record_function"),
    ("torch.nn.functional", _library, " ".join(key for key in vars(_library) if callable(vars(_library)[key]))),
    ("numpy", np, "median percentile quantile sort mean"),
    ("rooflab.reference.compare", compare, "elementwise"),
)
"""Timer, flush and comparison, and the library's calls, whose times a kernel's are compared with."""
_TORCH = Path(torch.__file__).parent
_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def _genuine(owner: Any, name: str, function: Any) -> bool:
    """Whether a clock is Python's or torch's own; other functions are taken for it."""
    if owner is time:
        return isinstance(function, BuiltinFunctionType) and function.__name__ == name
    code = getattr(function, "__code__", None)
    return owner is not _cuda.Event or code is None or _TORCH in Path(code.co_filename).parents


def _wrong_clocks() -> list[str]:
    """Clocks that are Python's own and tell another time than the system: time-machine changes them from inside."""
    found, reading = [], (ctypes.c_long * 2)()
    for name, number in (("time", 0), ("perf_counter", 1)) if _libc else ():
        _libc.clock_gettime(number, reading)
        if (apart := abs(getattr(time, name)() - reading[0] - 1e-9 * reading[1])) > APART_S:
            found.append(f"time.{name} was replaced: it is {apart:.0f} s from the system's clock")
    return found


APART_S = 2.0
"""A process that waits for a core between the two readings is not taken for a replaced clock."""
_BOUND = [
    (f"{place}.{name}", owner, name, getattr(owner if _genuine(owner, name, getattr(owner, name)) else system, name))
    for place, owner, names in _WATCHED
    for name in names.split()
    if hasattr(owner, name)  # a build of torch without CUDA lacks some
]


def tampered(threads: int | None = None) -> str | None:
    """The functions that are others than at import (`time.perf_counter was replaced (mine.py:3)`), or None.

    With `threads` it also says that torch has another number of threads now.  It undoes all of it, so that the next
    kernel is not blamed for the last one's change.
    """
    found = []
    if threads is not None and (now := torch.get_num_threads()) != threads:
        torch.set_num_threads(threads)
        found.append(f"the number of torch's threads changed from {threads} to {now}")
    for full, owner, name, bound in _BOUND:
        new = getattr(owner, name, None)
        if new is not bound and not (owner is time and _genuine(owner, name, new)):
            setattr(owner, name, bound)
            code = getattr(new, "__code__", None)
            place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
            found.append(f"{full} was replaced{place}")
    return "; ".join(found + _wrong_clocks()) or None
