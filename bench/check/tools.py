"""Whether a kernel has replaced what it is judged with: torch's functions, Python's, the comparison, the clocks.

Names are watched from the moment this file is imported, which is before a kernel's file is, unless a test file imports
it first: then what is no original any more is found by where it was written. `tamper.py` holds what the timer needs;
this is the wider net under the check, says who did it, and puts the originals back.
"""

from __future__ import annotations

import builtins
import inspect
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.timing import tamper
from rooflab.reference import compare, spec

_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")
_CUDA = ("Event", "ExternalStream", "Stream", "_sleep", "current_stream", "default_stream", "stream", "synchronize")
_BUILTINS = tuple("abs all any bool float int isinstance len list map max min sum type zip".split())
_NATIVE = ("sum", "equal", "allclose", "isnan", "isfinite", "where", "empty", "full")
_OF_TORCH = str(Path(torch.__file__).parent)
_CODE = attrgetter("__code__")
_all, _map = all, map
"""The originals: by identity and in C, because what replaces a function may say that it equals it."""
_DESCRIPTORS = (property, staticmethod, classmethod, types.GetSetDescriptorType)


@dataclass(frozen=True)
class _Tools:
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
    def of(cls, name: str, place: Any, names: Iterable[str] = ()) -> _Tools:
        there = {key: vars(place)[key] for key in names or vars(place) if key in vars(place)}
        kept = {key: value for key, value in there.items() if callable(value) or isinstance(value, _DESCRIPTORS)}
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
        """Puts back what was there."""
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


_TOOLS = (
    _Tools.of("time", time, _CLOCKS),
    _Tools.of("torch", torch),
    _Tools.of("torch.Tensor", torch.Tensor),
    _Tools.of("torch.cuda", torch.cuda, _CUDA),
    _Tools.of("torch.cuda.Event", torch.cuda.Event),
    _Tools.of("torch.cuda.Stream", torch.cuda.Stream),
    _Tools.of("builtins", builtins, _BUILTINS),
    _Tools.of("rooflab.reference.compare", compare),
    _Tools.of("rooflab.reference.spec", spec, ("elementwise", "as_tuple")),
    _Tools.of("OpSpec", spec.OpSpec, ("judge", "oracle")),
)


def _replaced_before() -> str | None:
    """The first tool that was no original even when this file was imported."""
    for name in _CLOCKS:
        if not isinstance(getattr(time, name), types.BuiltinFunctionType):
            return f"a patched timer: time.{name} was replaced before the bench was imported"
    for name in _NATIVE:
        value = getattr(torch, name)
        if isinstance(value, types.FunctionType) and not _file(value).startswith(_OF_TORCH):
            kind = _kind("torch", name)
            return f"a patched {kind}: torch.{name} was replaced before the bench was imported ({_place(value)})"
    return None


def tampered(timers: bool = True) -> str | None:
    """The first tool that is not the original: `a patched timer: time.perf_counter was replaced (mine.py:3)`.

    Without `timers` it leaves out what only a timer calls, and takes 50 us.
    """
    if _EARLIER is not None:
        return _EARLIER
    for tools in _TOOLS:
        for name in tools.replaced():
            place = _place(inspect.getattr_static(tools.place, name, None))
            by = f" ({place})" if place else ""
            return f"a patched {_kind(tools.name, name)}: {tools.name}.{name} was replaced{by}"
    found = tamper.tampered() if timers else None
    return f"a patched timer: {found}" if found else None


def _place(value: Any) -> str:
    code = getattr(value, "__code__", None) or getattr(getattr(value, "__init__", None), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _kind(place: str, name: str) -> str:
    if place in ("time", "torch.cuda", "torch.cuda.Event", "torch.cuda.Stream"):
        return "timer"
    return "cache flush" if name == "sum" and place.startswith("torch") else "comparison"


def restore() -> None:
    """Puts the originals back, so that what one kernel did is not laid on the next."""
    for tools in _TOOLS:
        tools.restore()


_EARLIER = _replaced_before()
