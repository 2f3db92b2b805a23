"""How a CTA finds its expert and tile from the offsets on the device, and the traffic of tiles of groups."""

from __future__ import annotations

import triton
import triton.language as tl

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm_grouped._operands import group_rows
from rooflab.kernels.lib.tiles import grouped_tile
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a once, an expert's matrix once per group of its row panels, without reuse from L2."""
    a, b, offsets, config = inputs.a, inputs.b, inputs.offsets, inputs.config
    _, K, N = b.shape
    reads = sum(cdiv(own, config.block_m * config.group_m) for own in group_rows(offsets))
    return Traffic(nbytes(a, offsets) + reads * K * N * b.element_size(), a.shape[0] * N * a.element_size())


@triton.jit
def tile_of(offsets_ptr, E, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The program's expert, first row and column of tiles, and the end of the group (at most the first row if the
    program has no tile)."""
    experts = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + experts, mask=experts < E, other=2**31 - 1)
    panel = tl.program_id(0) // tiles_n
    # The last expert whose panels begin at or before this one; others that begin here have no rows.
    expert = tl.sum((starts // BLOCK_M + experts <= panel).to(tl.int32)) - 1
    start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    tile = tl.program_id(0) - (start // BLOCK_M + expert) * tiles_n
    tiles_m = tl.cdiv(end - start, BLOCK_M)
    if tile >= tiles_m * tiles_n:
        end = start
    tile_m, tile_n = grouped_tile(tile, max(tiles_m, 1), tiles_n, GROUP_M)
    return expert, start + tile_m * BLOCK_M, tile_n, end
