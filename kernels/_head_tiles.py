"""The configs of the kernels that move the heads of a token: rope, kv_cache_write and rope_and_cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooflab.kernels.tuning import BF16, space
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config:
    """One way to launch the kernel."""

    tile: int
    """Values of a program: of each half of its heads, or of k and as many of v."""
    num_warps: int


def tiles(least: int, per_thread: int) -> Callable[..., tuple[Config, ...]]:
    """`configs` of a `Tuning`: five tiles from `least` up, of 2 to `per_thread` values a thread."""
    every = space(Config, tile=[least << i for i in range(5)], num_warps=(1, 2, 4, 8))

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        return tuple(c for c in every(case) if 2 <= c.tile // (32 * c.num_warps) <= per_thread)

    return configs
