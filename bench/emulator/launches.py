"""Emulates every kernel launch of Triton and Gluon in this process, on CPU tensors."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.compile.cases import SM, properties
from rooflab.bench.compile.pretended_graph import capturing
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.results import Bytes, LaunchResult

_ATEN = torch.ops.aten
_ALLOCATORS = (
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.empty_permuted,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
)


class FreshMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records tensors without valid contents, from `torch.empty` and similar functions.  It is a torch dispatch mode.

    A tensor is recorded until another torch function uses it.  A view shares the memory and does not count as a use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: dict[int, torch.Tensor] = {}
        """The tensors by the address of their storage; held so that no other tensor can get the same memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in _ALLOCATORS and not kwargs.keys() & {"out"}:
            if result.device.type == "cpu" and result.layout == torch.strided and result.untyped_storage().nbytes():
                self._tensors[result.untyped_storage().data_ptr()] = result
        elif self._tensors and not _is_view(func):
            self.forget(tensors_in((args, kwargs)))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._tensors.clear()

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors in `tensors` that have not been written."""
        return [tensor for tensor in tensors if _address(tensor) in self._tensors]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records that `tensors` may have been written."""
        for tensor in tensors:
            self._tensors.pop(_address(tensor), None)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns all tensors in `value`: in lists, tuples, mappings, and as the `base` of tensor descriptors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [tensor for item in value for tensor in tensors_in(item)]
    base_tensor = getattr(value, "base", None)
    return [base_tensor] if isinstance(base_tensor, torch.Tensor) else []


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_view(func: Any) -> bool:
    """Tells whether a torch function returns the memory of an argument and writes nothing."""
    alias_infos = [return_value.alias_info for return_value in func._schema.returns]
    return bool(alias_infos) and all(alias_info is not None and not alias_info.is_write for alias_info in alias_infos)


QUICK = Checks(races=False, counts=False)
"""The checks of a kernel's later calls: only the values, under another order of warps and copies."""


class NotSampled(ValueError):
    """Raised if a kernel cannot run with only some of its CTAs."""


@dataclass
class Launches:
    """Holds the emulated launches of one or several calls, and their results."""

    results: list[LaunchResult] = field(default_factory=list)
    """Results of the launches with all checks."""
    checks: Checks = field(default_factory=Checks)
    seed: int = 0
    ctas: int | None = None
    """The number of CTAs that run besides the first CTA and the last CTA; None means that all CTAs run."""
    ran: int = 0
    of: int = 0
    """The number of CTAs in the grids of all launches."""
    launched: int = 0
    faults: list[str] = field(default_factory=list)
    """The errors of launches that did not end well."""
    marks: Counter[str] = field(default_factory=Counter)
    """Sentences on what stands in place of a time, each with the number of calls."""
    fresh: FreshMemory = field(default_factory=FreshMemory)
    """A mode that is active while a kernel's function runs.  It knows which memory has not been written."""

    def __post_init__(self) -> None:
        if self.ctas is not None and self.ctas < 0:
            raise ValueError(f"ctas: expected 0 or more, got {self.ctas}")

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        """Emulates one launch.  While a CUDA graph is captured, records the launch instead."""
        if (graph := capturing()) is not None:
            graph.calls.append(partial(self.run, compiled, grid, args))
            return
        n_ctas, cta_numbers = math.prod(grid), None
        if self.ran < self.of:
            raise NotSampled("ctas: expected a kernel of one launch, got one whose next launch needs all of the first")
        if self.ctas is not None and n_ctas > self.ctas + 2:
            cta_numbers = [0, *sorted(random.Random(self.seed).sample(range(1, n_ctas - 1), self.ctas)), n_ctas - 1]
        self.ran += n_ctas if cta_numbers is None else len(cta_numbers)
        self.of += n_ctas
        try:
            launch_result = self.emulated(compiled, grid, args, cta_numbers)
        except EmulationError as error:
            self.faults.append(str(error))
            raise
        if self.checks.counts or self.checks.races:
            self.results.append(launch_result)

    def emulated(self, compiled: Any, grid: tuple[int, ...], args: list[Any], ctas: list[int] | None) -> LaunchResult:
        """Emulates the CTAs `ctas` of one launch.  If `ctas` is None, emulates all CTAs."""
        with torch._C.DisableTorchFunction():  # tensors may say that they are on a pretended card
            self.launched += 1
            tensors = tensors_in(args)
            # Later calls check only values: there the poison in fresh memory shows a read of unwritten memory.
            unwritten_tensors = self.fresh.among(tensors) if self.checks.races else []
            self.fresh.forget([*tensors, *self.reached])
            return emulate(
                compiled,
                grid,
                args,
                checks=self.checks,
                seed=self.seed,
                ctas=ctas,
                unwritten=unwritten_tensors,
                memory=self.reached,
            )

    @property
    def reached(self) -> list[torch.Tensor]:
        """Returns tensors whose addresses a kernel may read from memory instead of from its arguments.  Returns no
        tensors here; a subclass knows them."""
        return []

    @property
    def races(self) -> tuple[str, ...]:
        """Returns the races of all launches, without duplicates."""
        return tuple(dict.fromkeys(race for launch_result in self.results for race in launch_result.races))

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the notes of all launches, without duplicates.  A note is a fault that ptxas repairs."""
        return tuple(dict.fromkeys(note for launch_result in self.results for note in launch_result.notes))

    @property
    def bytes(self) -> Bytes:
        """Returns the bytes that all launches moved, as sums by memory level."""
        field_names = Bytes.__dataclass_fields__
        return Bytes(**{name: sum(getattr(result.bytes, name) for result in self.results) for name in field_names})


@contextmanager
def emulating_launches(launches: Launches, configs: Callable[..., Any] | None = None) -> Iterator[None]:
    """Passes every launch of Triton and Gluon to `launches`.  `configs` selects the configs of autotuned kernels.

    Raises `RuntimeError` in a process that interprets Triton's kernels."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("the emulator runs compiled kernels, and this process interprets them (TRITON_INTERPRET=1)")
    # Imported only here, because the first import of Triton fixes its mode for the process.
    from rooflab.bench.emulator.triton_kernels import emulating_triton

    with emulating_triton(SM, properties(), launches.run, configs, launches.marks):
        yield
