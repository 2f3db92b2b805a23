"""Runs kernels in the emulator: every launch of Triton, Gluon and CUDA C++ of this process, on CPU tensors.

Nothing here may run in a process that interprets Triton's kernels; `emulated_checks.py` asks one that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rooflab.bench.check.emulating import emulation
from rooflab.bench.compile.targets import DEFAULT, get_target
from rooflab.bench.emulate.fresh_memory import FreshMemory, tensors_in
from rooflab.bench.ptx.launch import Checks, emulate
from rooflab.bench.ptx.results import Bytes, Result
from rooflab.kernels.registry import interpreting

QUICK = Checks(races=False, counts=False)
"""What later runs of a check look for: values, under another order of warps and copies."""


@dataclass
class Launches:
    """What the emulated launches of one call, or several, did."""

    results: list[Result] = field(default_factory=list)
    """Of the launches that were watched in full."""
    checks: Checks = field(default_factory=Checks)
    seed: int = 0
    ctas: tuple[int, ...] | None = None
    """Numbers of the CTAs that run; None for all."""
    launched: int = 0
    fresh: FreshMemory = field(default_factory=FreshMemory)
    """Held while a kernel's function runs, it tells what memory nobody has written."""

    def run(self, compiled: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        """Emulates one launch."""
        chosen = None if self.ctas is None else [cta for cta in self.ctas if cta < _size(grid)]
        found = self.emulated(compiled, grid, args, chosen)
        if self.checks.counts or self.checks.races:
            self.results.append(found)

    def emulated(self, compiled: Any, grid: tuple[int, ...], args: list[Any], ctas: list[int] | None) -> Result:
        """What some CTAs of one launch do, all with None."""
        self.launched += 1
        given = tensors_in(args)
        # Later calls look at values alone, and the poison in fresh memory is one.
        unwritten = self.fresh.among(given) if self.checks.races else []
        self.fresh.forget(given)
        return emulate(compiled, grid, args, checks=self.checks, seed=self.seed, ctas=ctas, unwritten=unwritten)

    @property
    def races(self) -> tuple[str, ...]:
        """The races of all launches, each once."""
        return tuple(dict.fromkeys(race for result in self.results for race in result.races))

    @property
    def bytes(self) -> Bytes:
        """The bytes of all launches, added up."""
        names = Bytes.__dataclass_fields__
        return Bytes(**{name: sum(getattr(result.bytes, name) for result in self.results) for name in names})


def _size(grid: tuple[int, ...]) -> int:
    count = 1
    for size in grid:
        count *= size
    return count


@contextmanager
def emulating_launches(launches: Launches) -> Iterator[None]:
    """Every launch goes to `launches`.  Raises `RuntimeError` in a process that interprets Triton's kernels."""
    if interpreting():
        raise RuntimeError("the emulator runs compiled kernels, and this process interprets them (TRITON_INTERPRET=1)")
    # Only here: the first import of Triton fixes its mode for the process.
    from rooflab.bench.ptx.cuda_kernels import emulating_cuda
    from rooflab.bench.ptx.triton_launches import emulating_triton

    target = get_target(DEFAULT.name)
    with emulation(), emulating_triton(target.sm, target.properties(), launches.run), emulating_cuda(launches.run):
        yield
