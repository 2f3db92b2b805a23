"""The tiles of gemm_fp8's Triton rungs: what a CTA needs, and a table of defaults for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.lib.product_tiles import tile_footprint
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme

BLOCK_K = 128
"""K of a stage: 128 bytes are the widest swizzle of TMA and wgmma, and 128 values share a block scale."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options; the tile's K is 128."""

    block_k: ClassVar[int] = BLOCK_K
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of b in L2."""


def by_warps(config: Config, case: Case, scheme: Scheme = BF16, sums: int = 1) -> Footprint:
    """Needs of one or two warpgroups with this number of fp32 registers per output."""
    ctas = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    return tile_footprint(config, config.block_n, ctas, case, scheme, sums=sums)


def _tiles(*columns: int) -> Callable[..., tuple[Config, ...]]:
    """Tiles of one or two warpgroups, which have 64 rows or more each."""
    every = space(
        Config, block_m=(64, 128), block_n=columns, num_warps=(4, 8), num_stages=(3, 4, 5, 6, 8), group_m=(1, 8)
    )
    return lambda case, scheme=BF16: tuple(c for c in every(case, scheme) if 16 * c.num_warps <= c.block_m)


def outputs(case: Case, scheme: Scheme) -> dict[str, int]:
    """`sizes` of a table of defaults: values of the result."""
    return {"outputs": int(case["M"]) * int(case["N"])}


# By rows and columns of the result; unmeasured.  With few of either, narrow tiles give more SMs a tile.
_ONE_WARPGROUP = (
    ({"M": 64, "N": 4096}, Config(64, 16, 4, 6)), ({"M": 64, "N": 7168}, Config(64, 32, 4, 6)),
    ({"M": 64}, Config(64, 128, 4, 6)),
)  # fmt: skip
FAST_ACCUM = Tuning(
    Config, _tiles(16, 32, 64, 128, 256),  # up to the most columns of one wgmma
    Defaults((
        *_ONE_WARPGROUP,
        ({"N": 4096, "outputs": 524288}, Config(128, 16, 8, 4)), ({"outputs": 917504}, Config(128, 32, 8, 4)),
        ({"M": 128}, Config(128, 128, 8, 4)), ({"outputs": 2097152}, Config(128, 64, 8, 4)),
        ({"N": 4096}, Config(128, 256, 8, 4)), ({"M": 512}, Config(128, 128, 8, 4)), ({}, Config(128, 256, 8, 4)),
    ), outputs), by_warps,
)  # fmt: skip
PROMOTED = Tuning(
    # Up to the columns of one block scale, for which two accumulators fit: fp8's for this 128 of K, and the fp32 one.
    Config, _tiles(16, 32, 64, 128),
    Defaults((
        *_ONE_WARPGROUP,
        ({"N": 4096, "outputs": 524288}, Config(128, 16, 8, 5)), ({"K": 512}, Config(128, 128, 8, 5)),
        ({"outputs": 917504}, Config(128, 32, 8, 5)), ({"outputs": 2097152}, Config(128, 64, 8, 5)),
        ({}, Config(128, 128, 8, 5)),
    ), outputs), partial(by_warps, sums=2),
)  # fmt: skip
