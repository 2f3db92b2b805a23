"""FP32 fused multiply-adds and special functions, with operands in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernels import microkernel

TURN = 0.0625
"""Each step rotates a point by about this angle in radians.  The value is exact in fp32."""
FMA_FLOPS_PER_STEP = 4
"""FLOPs of one step of one point: two fused multiply-adds."""
FMA_TOLERANCE = 0.01
"""Covers the roundings of tens of thousands of steps; one step too many or too few is an error of 0.06."""
SPECIAL_TOLERANCE = 2e-3
"""Covers the roundings of sums of tens of thousands of terms, and the errors in the functions' last bits."""


@dataclass(frozen=True)
class ArithmeticShape:
    """A launch shape: threads per block, blocks per SM, and the independent points or sums of each thread."""

    threads: int
    blocks_per_sm: int
    pairs: int
    steps: int
    """Steps in the unrolled loop body: the loop's own instructions are less than 1% of them."""


FMA_SHAPES = (ArithmeticShape(256, 8, 4, 64), ArithmeticShape(512, 2, 8, 32), ArithmeticShape(256, 4, 4, 64))
SPECIAL_SHAPES = (ArithmeticShape(256, 8, 4, 64), ArithmeticShape(512, 2, 4, 64))
SPECIALS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"ex2": torch.exp2, "rsqrt": torch.rsqrt}


def groups(card: microkernel.Card, load: microkernel.Load) -> microkernel.Groups:
    """Yields the group of the fp32 pipe, then one group for each special function."""
    yield microkernel.MicrokernelGroup("fma", [_fma(card, load, shape) for shape in FMA_SHAPES])
    for name in SPECIALS:
        yield microkernel.MicrokernelGroup(name, [_special(card, load, shape, name) for shape in SPECIAL_SHAPES])


def _defines(shape: ArithmeticShape, special: str) -> tuple[str, ...]:
    return microkernel.defines(
        THREADS=shape.threads,
        BLOCKS_PER_SM=shape.blocks_per_sm,
        PAIRS=shape.pairs,
        STEPS=shape.steps,
        RSQRT=int(special == "rsqrt"),
    )


def _fma(card: microkernel.Card, load: microkernel.Load, shape: ArithmeticShape) -> microkernel.Microkernel:
    """The microkernel of one shape, on random points that are the same for every block."""
    blocks = card.sms * shape.blocks_per_sm
    generator = torch.Generator(card.device).manual_seed(0)
    start = torch.randn(shape.pairs, shape.threads, 2, generator=generator, device=card.device)

    def expected(rounds: int) -> torch.Tensor:
        step = np.array([[1.0, TURN], [-TURN, 1.0 - TURN * TURN]])
        whole = torch.from_numpy(np.linalg.matrix_power(step, rounds * shape.steps)).to(card.device)
        return start.double().sum(0) @ whole.T

    run = microkernel.Sums(
        load(microkernel.source("arithmetic"), "fma_fp32", options=_defines(shape, "")),
        blocks,
        shape.threads,
        (start,),
        torch.zeros(blocks, shape.threads, 2, device=card.device),
        expected,
        FMA_TOLERANCE,
        "sums of points",
        lambda rounds: (np.float32(TURN), np.uint32(rounds)),
    )
    config = {"threads": shape.threads, "blocks_per_sm": shape.blocks_per_sm, "points": shape.pairs}
    work = float(blocks * shape.threads * shape.pairs * shape.steps * FMA_FLOPS_PER_STEP)
    return run.measuring("fma", "flop", work, config)


def _special(
    card: microkernel.Card, load: microkernel.Load, shape: ArithmeticShape, name: str
) -> microkernel.Microkernel:
    """The microkernel of one shape and one function; arguments start in [1, 2) and grow to at most 3."""
    blocks = card.sms * shape.blocks_per_sm
    function = SPECIALS[name]
    generator = torch.Generator(card.device).manual_seed(0)
    first = 1 + torch.rand(shape.threads, generator=generator, device=card.device)

    def step(rounds: int) -> np.float32:
        return np.float32(1.0 / (rounds * shape.steps))

    def expected(rounds: int) -> torch.Tensor:
        count = rounds * shape.steps
        sums = torch.zeros(shape.threads, dtype=torch.float64, device=card.device)
        for start in range(0, count, 4096):
            n = torch.arange(start, min(start + 4096, count), dtype=torch.float64, device=card.device)
            sums += function(first.double()[:, None] + n * float(step(rounds))).sum(1)
        return sums

    run = microkernel.Sums(
        load(microkernel.source("arithmetic"), "special_function", options=_defines(shape, name)),
        blocks,
        shape.threads,
        (first,),
        torch.zeros(blocks, shape.threads, device=card.device),
        expected,
        SPECIAL_TOLERANCE,
        "sums of function values",
        lambda rounds: (step(rounds), np.uint32(rounds)),
    )
    config = {"threads": shape.threads, "blocks_per_sm": shape.blocks_per_sm, "sums": shape.pairs}
    return run.measuring(name, "op", float(blocks * shape.threads * shape.steps), config)
