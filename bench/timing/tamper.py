"""The clocks as they were when the bench was imported, and whether somebody has replaced one since.

A kernel is a program in the same process as its timer, and kernels that replaced `perf_counter` or an event's
`elapsed_time` have been submitted to public contests.  So the stopwatches call what is held here, and `tampered` names
whatever no longer is what it was: the function behind a name, or the code inside the function.
"""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch

_cuda: Any = torch.cuda
"""Untyped, because torch leaves most of it without annotations."""


class _Held(NamedTuple):
    owner: Any
    attribute: str
    value: Any
    code: Any


def _hold(owner: Any, attribute: str) -> _Held:
    value = inspect.getattr_static(owner, attribute)
    return _Held(owner, attribute, value, getattr(value, "__code__", None))


_NAMES = (
    (time, "time", ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns")),
    (_cuda, "torch.cuda", ("Event", "Stream", "CUDAGraph", "synchronize", "current_stream", "stream", "_sleep")),
    (_cuda.Event, "torch.cuda.Event", ("record", "query", "elapsed_time", "synchronize")),
    (_cuda.Stream, "torch.cuda.Stream", ("synchronize", "wait_event", "wait_stream")),
    (_cuda.CUDAGraph, "torch.cuda.CUDAGraph", ("capture_begin", "capture_end", "replay")),
    (torch.autograd.profiler, "torch.autograd.profiler", ("profile", "record_function")),
    (torch, "torch", ("sum",)),
    (torch.Tensor, "torch.Tensor", ("sum", "fill_")),
    (torch._C, "torch._C", ("_cuda_sleep", "_cuda_synchronize", "_cuda_getCurrentRawStream", "_cuda_getCurrentStream")),
)
_WATCHED = {
    f"{path}.{attribute}": _hold(owner, attribute)
    for owner, path, attributes in _NAMES
    for attribute in attributes
    if hasattr(owner, attribute)  # a build of torch without CUDA lacks some
}

perf_counter = time.perf_counter
"""The host's clock."""
tensor_sum = torch.sum
"""What a flush by reading calls."""
tensor_fill = torch.Tensor.fill_
"""What a flush by writing calls."""


def tampered() -> str | None:
    """What of the timer was replaced, by name; None where all of it is as it was at import, and torch's and Python's.

    A function counts as replaced where another stands behind its name, or its code was exchanged in place.
    """
    names = [name for name, held in _WATCHED.items() if _replaced(held)]
    if names:
        return f"{', '.join(names)} replaced while the bench ran"
    forged = [name for name, held in _WATCHED.items() if not _genuine(held)]
    return f"{', '.join(forged)} replaced before the bench was imported" if forged else None


def _replaced(held: _Held) -> bool:
    try:
        now = inspect.getattr_static(held.owner, held.attribute)
    except AttributeError:
        return True
    return now is not held.value or getattr(now, "__code__", None) is not held.code


def _genuine(held: _Held) -> bool:
    """Whether a function of Python is written in torch's own files, and one of `time` is built in."""
    if held.owner is time:
        return isinstance(held.value, BuiltinFunctionType) and held.value.__self__ is time
    if isinstance(held.value, FunctionType):
        return Path(held.code.co_filename).is_relative_to(_TORCH)
    return True


_TORCH = Path(torch.__file__).parent
