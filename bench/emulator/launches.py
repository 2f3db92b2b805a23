"""Emulates every kernel launch of Triton and Gluon in this process, on CPU tensors."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from rooflab.bench.compile.cases import SM, properties
from rooflab.bench.compile.pretended import OnGpu
from rooflab.bench.compile.pretended_graph import capturing
from rooflab.bench.emulator.faults import Finding, Rule
from rooflab.bench.emulator.fresh_memory import FreshMemory, tensors_in
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.results import Bytes, LaunchResult

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
    views: bool = False
    """Whether accesses must stay among the elements of the views that a launcher passes."""
    ran: int = 0
    of: int = 0
    """The number of CTAs in the grids of all launches."""
    launched: int = 0
    failed: list[Finding] = field(default_factory=list)
    """The faults that ended launches."""
    printed: list[str] = field(default_factory=list)
    """The lines that kernels printed (`device_print`, `printf`), each with its kernel, CTA and thread."""
    marks: Counter[str] = field(default_factory=Counter)
    """Sentences on what stands in place of a time, each with the number of calls."""
    memory: tuple[torch.Tensor, ...] = ()
    """Tensors that kernels reach by pointers, and whose addresses were taken before the launches."""
    gpu: OnGpu | None = None
    """The pretended GPU, if it keeps the tensors whose addresses a program asked for."""
    fresh: FreshMemory = field(default_factory=FreshMemory)
    """A mode that is active while a kernel's function runs.  It knows which memory has not been written."""

    def __post_init__(self) -> None:
        if self.ctas is not None and self.ctas < 0:
            raise ValueError(f"ctas: expected 0 or more, got {self.ctas}")
        self.fresh.report = partial(self._add, "output-not-written", "note")
        self.fresh.order.report = partial(self._add, "stream-order", "error")

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
        launch_result = self.emulated(compiled, grid, args, cta_numbers)
        if self.checks.counts or self.checks.races:
            self.results.append(launch_result)

    def emulated(self, compiled: Any, grid: tuple[int, ...], args: list[Any], ctas: list[int] | None) -> LaunchResult:
        """Emulates the CTAs `ctas` of one launch.  If `ctas` is None, emulates all CTAs."""
        with torch._C.DisableTorchFunction():  # tensors may say that they are on a pretended card
            self.launched += 1
            tensors, written_flags = [*tensors_in(args), *self.reached], {}
            if self.checks.races and self.checks.uninitialised:
                written_flags = self.fresh.written(tensors, len(self.results))
            else:  # only values are checked: there the poison in fresh memory shows a read of unwritten memory
                self.fresh.forget(tensors)
            turn = self.fresh.order.turn(len(self.results)) if self.checks.races and self.checks.counts else None
            try:
                result = emulate(
                    compiled,
                    grid,
                    args,
                    checks=self.checks,
                    seed=self.seed,
                    ctas=ctas,
                    written=written_flags,
                    memory=self.reached,
                    printed=self.printed,
                    views=self.views,
                    turn=turn,
                )
            except EmulationError as error:
                self.failed.append(error.fault)
                raise
            if turn is not None:
                self.fresh.order.end(turn)
            return result

    def check_outputs(self, outputs: Any) -> None:
        """Adds a note for each tensor in `outputs` that `torch.empty` made, and of which nobody wrote some elements."""
        for index, tensor in enumerate(tensors_in(outputs)):
            self.fresh.check(tensor, f"output {index} of the launcher", len(self.results) - 1)

    def _add(self, rule: Rule, severity: Literal["error", "note"], launch: int, text: str) -> None:
        """Adds a finding to the launch of number `launch`, unless only some CTAs ran."""
        if self.ran == self.of and 0 <= launch < len(self.results):
            result = self.results[launch]
            found = Finding(rule, severity, result.kernel, text, grid=result.grid)
            self.results[launch] = replace(result, findings=tuple(dict.fromkeys((*result.findings, found))))

    @property
    def reached(self) -> list[torch.Tensor]:
        """Returns the tensors that kernels may access through pointers that are stored in memory."""
        return [*self.memory, *(self.gpu.addressed.values() if self.gpu else ())]

    @property
    def findings(self) -> list[Finding]:
        """Returns the faults of all launches, without duplicates: faults that ended a launch, other errors, notes."""
        found = [finding for launch_result in self.results for finding in launch_result.findings]
        return sorted(dict.fromkeys([*self.failed, *found]), key=lambda finding: finding.severity)

    @property
    def races(self) -> tuple[str, ...]:
        """Returns the races of all launches, without duplicates."""
        return tuple(dict.fromkeys(race for launch_result in self.results for race in launch_result.races))

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the notes of all launches, without duplicates.  `LaunchResult.notes` describes them."""
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
