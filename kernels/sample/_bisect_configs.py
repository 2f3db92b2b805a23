"""The blocks of `bisect`: which are worth a try, what they need, and the default."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

THRESHOLDS = 16
"""Keys that a step of the search compares at once."""
ADDRESS_REGISTERS = 32
"""For the row's settings, pointers and masks, in addition to the accumulator of the search."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel."""

    block: int
    """Tokens per step of the other passes."""
    search_block: int
    """Tokens per step of the search."""
    num_warps: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Blocks of 2 to 16 tokens per thread; for the search 1 to 8."""
    return tuple(
        Config(block, search_block, num_warps)
        for block, search_block, num_warps in itertools.product((512, 1024, 2048, 4096), (256, 512, 1024), (4, 8, 16))
        if 2 <= block // (32 * num_warps) <= 16 and 1 <= search_block // (32 * num_warps) <= 8
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """The accumulator of the search (a sum per token and threshold), or the other passes' best values."""
    threads = 32 * config.num_warps
    held = max(THRESHOLDS * config.search_block, 2 * config.block)
    return Footprint(threads, cdiv(held, threads) + ADDRESS_REGISTERS, 0, int(case["B"]))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One config for every case: in the search 32 registers of a thread hold its tokens and 16 thresholds."""
    return Config(block=1024, search_block=512, num_warps=8)


TUNING = Tuning(Config, configs, heuristic, footprint)
