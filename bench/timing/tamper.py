"""Keeps the bench's tools as they were at import, and detects whether a kernel has replaced one since.

A kernel is a program in the same process as its timer and its judge, and kernels that replaced `perf_counter`, an
event's `elapsed_time` or the comparison have been submitted to public contests.  So the stopwatches call the functions
held here.  `timer_tampered` names each timer function that was replaced, or whose code was exchanged.  `tampered` also
checks the judge's tools and names the file that replaced one; the originals can be restored.

Names are watched from the moment this file is imported, which is before a kernel's file is, unless a test file imports
it first: then what is no original any more is found by where it was written.
"""

from __future__ import annotations

import builtins
import inspect
import os
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rooflab.reference import compare, spec

_cuda: Any = torch.cuda
"""Untyped, because torch leaves most of it without annotations."""
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")
_CUDA = ("Event", "ExternalStream", "Stream", "_sleep", "current_stream", "default_stream", "stream", "synchronize")
_OF_C = ("_cuda_sleep", "_cuda_synchronize", "_cuda_getCurrentRawStream", "_cuda_getCurrentStream")
_BUILTINS = tuple("abs all any bool float int isinstance len list map max min sum type zip".split())
_NUMPY = ("median", "percentile", "quantile", "sort", "mean")
_NATIVE = ("sum", "equal", "allclose", "isnan", "isfinite", "where", "empty", "full")
_OF_TORCH = str(Path(torch.__file__).parent)
_CODE = attrgetter("__code__")
_all, _map = all, map
"""The originals: by identity and in C, because what replaces a function may say that it equals it."""
_OTHERS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.ModuleType)

_ENVIRONMENT = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD")}
"""What decides on the code that the bench's later processes run."""

perf_counter = time.perf_counter
"""The host's clock."""
tensor_sum = torch.sum
"""What a flush by reading calls."""
tensor_fill = torch.Tensor.fill_
"""What a flush by writing calls."""


@dataclass(frozen=True)
class Originals:
    """What the attributes of one module or class were when this file was imported."""

    name: str
    place: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]
    functions: tuple[types.FunctionType, ...]
    """Those of the values whose code can be exchanged in place."""
    codes: tuple[types.CodeType, ...]
    own: frozenset[str]
    """Every name that was there."""
    get: Callable[[Any], tuple[Any, ...]]

    @classmethod
    def of(cls, name: str, place: Any, names: Iterable[str] = ()) -> Originals:
        """The attributes `names` of `place`, by default all; a build of torch without CUDA lacks some."""
        there = {key: vars(place)[key] for key in names or vars(place) if key in vars(place)}
        kept = {key: value for key, value in there.items() if callable(value) or isinstance(value, _OTHERS)}
        functions = tuple(value for value in kept.values() if isinstance(value, types.FunctionType))
        codes = tuple(map(_CODE, functions))
        values, own = tuple(kept.values()), frozenset(vars(place))
        return cls(name, place, tuple(kept), values, functions, codes, own, itemgetter(*kept))

    def replaced(self) -> Iterator[str]:
        """Names that hold something else now, or that were put in front of those that a class inherits."""
        found = vars(self.place)
        try:
            now = self.get(found)
        except KeyError:  # one was deleted
            now = tuple(_map(found.get, self.names))
        if not _all(_map(is_, now, self.values)):
            for key, value, was in zip(self.names, now, self.values, strict=True):
                # torch._dynamo replaces torch.manual_seed, which is torch's own affair.
                if value is not was and not _file(value).startswith(_OF_TORCH):
                    yield key
        if not _all(_map(is_, _map(_CODE, self.functions), self.codes)):
            for function, code in zip(self.functions, self.codes, strict=True):
                if function.__code__ is not code and not function.__code__.co_filename.startswith(_OF_TORCH):
                    yield self.names[self.values.index(function)]
        if isinstance(self.place, type) and len(found) != len(self.own):
            inherited = {key for base in self.place.__mro__[1:] for key in vars(base)}
            yield from sorted((set(found) - self.own) & inherited)

    def restore(self) -> None:
        for key in list(self.replaced()):
            if key in self.names:
                setattr(self.place, key, self.values[self.names.index(key)])
            else:
                delattr(self.place, key)
        for function, code in zip(self.functions, self.codes, strict=True):
            function.__code__ = code


def _file(value: Any) -> str:
    code = getattr(value, "__code__", None)
    return code.co_filename if code is not None else ""


_WATCHED = (
    Originals.of("time", time, _CLOCKS),
    Originals.of("torch", torch),
    Originals.of("torch.Tensor", torch.Tensor),
    Originals.of("torch.cuda", _cuda, _CUDA),
    Originals.of("torch.cuda.Event", _cuda.Event),
    Originals.of("torch.cuda.Stream", _cuda.Stream),
)
"""What timer and judge both stand on."""
_OF_THE_TIMER = [
    Originals.of("numpy", np, _NUMPY),
    Originals.of("torch.nn.functional", torch.nn.functional),
    Originals.of("torch.cuda.CUDAGraph", _cuda.CUDAGraph, ("capture_begin", "capture_end", "replay")),
    Originals.of("torch.autograd.profiler", torch.autograd.profiler, ("profile", "record_function")),
    # A build of torch without CUDA has none of these.
    *([Originals.of("torch._C", torch._C, _OF_C)] if hasattr(torch._C, "_cuda_sleep") else ()),
]
_OF_THE_JUDGE = (
    Originals.of("builtins", builtins, _BUILTINS),
    Originals.of("rooflab.reference.compare", compare),
    Originals.of("rooflab.reference.spec", spec, ("elementwise", "as_tuple")),
    Originals.of("OpSpec", spec.OpSpec, ("judge", "oracle")),
)


def watch(name: str, place: Any, names: Iterable[str] = ()) -> None:
    """Watches more of what the timer stands on."""
    _OF_THE_TIMER.append(Originals.of(name, place, names))


def _replaced_before() -> Iterator[tuple[str, str]]:
    """Module and name of each tool that was no original even when this file was imported."""
    for name in _CLOCKS:
        if not isinstance(getattr(time, name), types.BuiltinFunctionType):
            yield "time", name
    for place, owner, names in (
        ("torch", torch, _NATIVE),
        ("torch.cuda", _cuda, _CUDA),
        ("torch.cuda.Event", _cuda.Event, ("record", "query", "elapsed_time", "synchronize")),
        ("torch.cuda.CUDAGraph", _cuda.CUDAGraph, ("capture_begin", "capture_end", "replay")),
        ("torch.autograd.profiler", torch.autograd.profiler, ("profile", "record_function")),
    ):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, types.FunctionType) and not _file(value).startswith(_OF_TORCH):
                yield place, name


def timer_tampered() -> str | None:
    """What of the timer was replaced, by name; None where all of it is as it was at import, and torch's and Python's.

    A function counts as replaced where another stands behind its name, or its code was exchanged in place.
    """
    names = [f"{tools.name}.{name}" for tools in (*_WATCHED, *_OF_THE_TIMER) for name in tools.replaced()]
    if names:
        return f"{', '.join(names)} replaced while the bench ran"
    return f"{', '.join(map('.'.join, _EARLIER))} replaced before the bench was imported" if _EARLIER else None


def tampered(timers: bool = True) -> str | None:
    """The first tool that is not the original: `a patched timer: time.perf_counter was replaced (mine.py:3)`.

    Without `timers` it leaves out what only a timer calls, and takes 50 us.
    """
    for place, name in _EARLIER:
        return f"a patched {_kind(place, name)}: {place}.{name} was replaced before the bench was imported"
    for tools in (*_WATCHED, *_OF_THE_JUDGE, *(_OF_THE_TIMER if timers else ())):
        for name in tools.replaced():
            place = _place(inspect.getattr_static(tools.place, name, None))
            by = f" ({place})" if place else ""
            return f"a patched {_kind(tools.name, name)}: {tools.name}.{name} was replaced{by}"
    changed = [name for name, value in _ENVIRONMENT.items() if os.environ.get(name) != value]
    return f"a changed environment: {', '.join(changed)}" if changed else None


def _place(value: Any) -> str:
    code = getattr(value, "__code__", None) or getattr(getattr(value, "__init__", None), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _kind(place: str, name: str) -> str:
    if place == "torch.nn.functional":
        return "library"
    if place.startswith(("time", "torch.cuda", "torch.autograd", "torch._C", "numpy", "rooflab.bench.timing")):
        return "timer"
    return "cache flush" if name == "sum" and place.startswith("torch") else "comparison"


def restore() -> None:
    """Restores the originals, so that the next kernel is not blamed for the last one's change."""
    for tools in (*_WATCHED, *_OF_THE_TIMER, *_OF_THE_JUDGE):
        tools.restore()
    for name, value in _ENVIRONMENT.items():
        os.environ.pop(name, None)
        os.environ.update({} if value is None else {name: value})


_EARLIER = tuple(_replaced_before())
