"""Defines the configs of gemm_fp8's Triton kernels: the configs to try, and a table of default configs per kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rooflab.kernels.gemm._tiles import Config, by_pointers, outputs, space
from rooflab.kernels.tuning import BF16, Defaults, Tuning

BLOCK_K = 128
"""The size of a stage along K: 128 bytes are the widest swizzle of TMA and wgmma, and 128 values share a scale."""


def _tiles(*columns: int) -> Callable[..., tuple[Config, ...]]:
    """Returns a function that makes the configs to try for tiles with the widths `columns`.  A config has one or two
    warpgroups, each with at least 64 rows."""
    tile_sizes, stage_counts = ((64, 128), columns, (BLOCK_K,)), (3, 4, 5, 6, 8)
    all_configs = space(Config, tile_sizes, num_warps=(4, 8), num_stages=stage_counts, group_m=(1, 8))
    return lambda case, scheme=BF16: tuple(c for c in all_configs(case, scheme) if 16 * c.num_warps <= c.block_m)


# By rows and columns of the result; unmeasured.  With few rows or columns, narrow tiles give more SMs a tile.
_ONE_WARPGROUP_DEFAULTS = (
    ({"M": 64, "N": 4096}, Config(64, 16, 128, 4, 6)),
    ({"M": 64, "N": 7168}, Config(64, 32, 128, 4, 6)),
    ({"M": 64}, Config(64, 128, 128, 4, 6)),
)
FAST_ACCUM = Tuning(
    Config,
    _tiles(16, 32, 64, 128, 256),  # up to the most columns of one wgmma
    Defaults(
        (
            *_ONE_WARPGROUP_DEFAULTS,
            ({"N": 4096, "outputs": 524288}, Config(128, 16, 128, 8, 4)),
            ({"outputs": 917504}, Config(128, 32, 128, 8, 4)),
            ({"M": 128}, Config(128, 128, 128, 8, 4)),
            ({"outputs": 2097152}, Config(128, 64, 128, 8, 4)),
            ({"N": 4096}, Config(128, 256, 128, 8, 4)),
            ({"M": 512}, Config(128, 128, 128, 8, 4)),
            ({}, Config(128, 256, 128, 8, 4)),
        ),
        outputs,
    ),
    by_pointers,
)
PROMOTED = Tuning(
    # Up to the columns of one block scale, for which two accumulators fit: fp8's for this 128 of K, and the fp32 one.
    Config,
    _tiles(16, 32, 64, 128),
    Defaults(
        (
            *_ONE_WARPGROUP_DEFAULTS,
            ({"N": 4096, "outputs": 524288}, Config(128, 16, 128, 8, 5)),
            ({"K": 512}, Config(128, 128, 128, 8, 5)),
            ({"outputs": 917504}, Config(128, 32, 128, 8, 5)),
            ({"outputs": 2097152}, Config(128, 64, 128, 8, 5)),
            ({}, Config(128, 128, 128, 8, 5)),
        ),
        outputs,
    ),
    partial(by_pointers, sums=2),
)
