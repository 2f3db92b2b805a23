"""The order of a product's tiles, so that CTAs that run at once share rows and columns in L2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the `tile`-th tile: within a group of GROUP_M row panels the row changes fastest."""
    group_tiles = GROUP_M * tiles_n
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_tiles % group_m, tile % group_tiles // group_m
