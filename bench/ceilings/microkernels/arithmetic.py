"""FP32 fused multiply-adds and special functions, from registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rooflab.bench.ceilings.microkernels.microkernel import (
    Card,
    Clocks,
    Group,
    Groups,
    Launchable,
    Load,
    Microkernel,
    defines,
    disagreement,
    source,
)

TURN = 0.0625
"""Exact in fp32.  A step turns a point by about as many radians."""
FMA_FLOPS_PER_STEP = 4
"""Of one point: two fused multiply-adds."""
FMA_TOLERANCE = 0.01
"""Roundings over tens of thousands of steps; one step more or less is 0.06."""
SPECIAL_TOLERANCE = 2e-3
"""Roundings of sums of tens of thousands of terms, and the functions' own last bits."""
POISON = float("nan")


@dataclass(frozen=True)
class Shape:
    """A launch shape: threads a block, blocks an SM, and points or sums that a thread works on side by side."""

    threads: int
    blocks_per_sm: int
    pairs: int
    steps: int
    """In the unrolled body of the loop, so that the loop's own instructions are less than 1%."""


FMA_SHAPES = (Shape(256, 8, 4, 64), Shape(512, 2, 8, 32), Shape(256, 4, 4, 64))
SPECIAL_SHAPES = (Shape(256, 8, 4, 64), Shape(512, 2, 4, 64))
SPECIALS = ("ex2", "rsqrt")


def groups(card: Card, load: Load) -> Groups:
    """The fp32 pipe, then each special function."""
    yield Group("fma", [_fma(card, load, shape) for shape in FMA_SHAPES])
    for name in SPECIALS:
        yield Group(name, [_special(card, load, shape, name) for shape in SPECIAL_SHAPES])


def _fma(card: Card, load: Load, shape: Shape) -> Microkernel:
    options = defines(
        THREADS=shape.threads, BLOCKS_PER_SM=shape.blocks_per_sm, PAIRS=shape.pairs, STEPS=shape.steps, RSQRT=0
    )
    run = _Fma(card, shape, load(source("arithmetic"), "fma_fp32", options=options))
    points = run.blocks * shape.threads * shape.pairs
    return Microkernel(
        limit="fma",
        config={"threads": shape.threads, "blocks_per_sm": shape.blocks_per_sm, "points": shape.pairs},
        unit="flop",
        work=float(points * shape.steps * FMA_FLOPS_PER_STEP),
        launch=run.launch,
        wrong=run.wrong,
        clock_hz=run.clocks.hz,
    )


class _Fma:
    """Launches of one shape over the same random points."""

    def __init__(self, card: Card, shape: Shape, kernel: Launchable):
        self.blocks = card.sms * shape.blocks_per_sm
        self.clocks = Clocks.of(self.blocks, card.device)
        self._shape = shape
        self._kernel = kernel
        generator = torch.Generator(card.device).manual_seed(0)
        # (pairs, threads, 2): the same for every block.
        self._start = torch.randn(shape.pairs, shape.threads, 2, generator=generator, device=card.device)
        self._sums = torch.zeros(self.blocks, shape.threads, 2, device=card.device)

    def launch(self, rounds: int) -> None:
        scalars = (np.float32(TURN), np.uint32(rounds))
        self._kernel((self.blocks,), (self._shape.threads,), self._start, self._sums, self.clocks.counts, *scalars)

    def wrong(self, rounds: int) -> str:
        self._sums.fill_(POISON)
        self.launch(rounds)
        step = np.array([[1.0, TURN], [-TURN, 1.0 - TURN * TURN]])
        whole = torch.from_numpy(np.linalg.matrix_power(step, rounds * self._shape.steps)).to(self._sums.device)
        expected = self._start.double().sum(0) @ whole.T
        return disagreement(self._sums, expected, FMA_TOLERANCE, "sums of points")


def _special(card: Card, load: Load, shape: Shape, name: str) -> Microkernel:
    options = defines(
        THREADS=shape.threads,
        BLOCKS_PER_SM=shape.blocks_per_sm,
        PAIRS=shape.pairs,
        STEPS=shape.steps,
        RSQRT=SPECIALS.index(name),
    )
    run = _Special(card, shape, name, load(source("arithmetic"), "special_function", options=options))
    return Microkernel(
        limit=name,
        config={"threads": shape.threads, "blocks_per_sm": shape.blocks_per_sm, "sums": shape.pairs},
        unit="op",
        work=float(run.blocks * shape.threads * shape.steps),
        launch=run.launch,
        wrong=run.wrong,
        clock_hz=run.clocks.hz,
    )


class _Special:
    """Launches of one shape of one function, over arguments from [1, 2) on to at most 3."""

    def __init__(self, card: Card, shape: Shape, name: str, kernel: Launchable):
        self.blocks = card.sms * shape.blocks_per_sm
        self.clocks = Clocks.of(self.blocks, card.device)
        self._shape = shape
        self._kernel = kernel
        self._function: Callable[[torch.Tensor], torch.Tensor] = {"ex2": torch.exp2, "rsqrt": torch.rsqrt}[name]
        generator = torch.Generator(card.device).manual_seed(0)
        self._first = 1 + torch.rand(shape.threads, generator=generator, device=card.device)
        self._sums = torch.zeros(self.blocks, shape.threads, device=card.device)

    def _step(self, rounds: int) -> np.float32:
        return np.float32(1.0 / (rounds * self._shape.steps))

    def launch(self, rounds: int) -> None:
        self._kernel(
            (self.blocks,),
            (self._shape.threads,),
            self._first,
            self._sums,
            self.clocks.counts,
            self._step(rounds),
            np.uint32(rounds),
        )

    def wrong(self, rounds: int) -> str:
        self._sums.fill_(POISON)
        self.launch(rounds)
        count = rounds * self._shape.steps
        expected = torch.zeros(self._shape.threads, dtype=torch.float64, device=self._sums.device)
        for start in range(0, count, 4096):
            n = torch.arange(start, min(start + 4096, count), dtype=torch.float64, device=self._sums.device)
            expected += self._function(self._first.double()[:, None] + n * float(self._step(rounds))).sum(1)
        return disagreement(self._sums, expected, SPECIAL_TOLERANCE, "sums of function values")
