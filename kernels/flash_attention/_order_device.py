"""The order in which persistent CTAs take tiles of queries; device code, which the picture of a schedule runs too.

In tma's grid the longest tiles of a causal mask (each head's last rows) may come at the end, when most SMs have no work
left, and L2 holds the keys of as many heads as there are SMs for their tiles.  Here the longest tiles come first
(Graham, 1969).  All heads of a section, whose keys and values fit in L2 together, come before the next section.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nth_tile(turn, cta, ctas):
    """The tile of a CTA's round `turn`.  Every second round runs over the CTAs backwards, so the CTA with the longest
    tile of one round has the shortest of the next."""
    return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)


@triton.jit
def count_tiles(tiles, cta, ctas):
    """The number of tiles of a CTA."""
    rounds = tiles // ctas
    position = cta if rounds % 2 == 0 else ctas - 1 - cta
    return rounds + (1 if position < tiles % ctas else 0)


@triton.jit
def place(tile, tiles_m, heads, section, CAUSAL: tl.constexpr):
    """Row of a tile (in tiles) and its head.  In the last section long tiles come first, in the one before it short
    ones, and so on, so lengths change slowly."""
    index = tile // (section * tiles_m)
    first = index * section
    size = min(heads - first, section)
    inside = tile - first * tiles_m
    tile_m = inside // size
    if CAUSAL:
        falls = ((heads - 1) // section - index) % 2 == 0
        tile_m = tiles_m - 1 - tile_m if falls else tile_m
    return tile_m, first + inside % size
