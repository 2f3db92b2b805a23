"""How a CTA finds its expert and tile from the offsets on the device, and the cost of tiles of groups.

The host knows neither the rows of an expert nor its row panels.  Expert e may use the panels from
floor(offsets[e] / BLOCK_M) + e on.  It needs at most floor(offsets[e + 1] / BLOCK_M) - floor(offsets[e] / BLOCK_M) + 1
panels, so no two experts share a panel, and T / BLOCK_M + E panels are enough; some stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import triton
import triton.language as tl

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiled import grouped_tile, tile_footprint
from rooflab.kernels.gemm._tma import Tiled
from rooflab.kernels.gemm_grouped._operands import group_rows
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA, Footprint
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

OPERAND_WEIGHT = 64
"""Cost of each operand value that a tile reads per k, in products, for the choice between tiles: a guess by which
128 x 128 tiles take 8/7 of the time of 128 x 256 tiles for the same work; unmeasured."""
BARRIERS_BYTES = 1024
"""Reserved for mbarriers and their alignment."""
MOST_STAGES = 8


def panels(T: int, E: int, block_m: int) -> int:
    """Row panels that are enough for any T rows in E groups."""
    return T // block_m + E


def panel_footprint(
    blocks: tuple[int, int, int],
    num_warps: int,
    staged_tiles: int,
    case: Case,
    scheme: Scheme,
    *,
    more_shared_bytes: int = 0,
) -> Footprint:
    """gemm's footprint, with a CTA for each possible tile.  `blocks`: M, N and K of a tile."""
    product = Case(M=case["T"], N=case["N"], K=case["K"])
    needs = tile_footprint(blocks, num_warps, staged_tiles, product, scheme, more_shared_bytes=more_shared_bytes)
    ctas = panels(int(case["T"]), int(case["E"]), blocks[0]) * cdiv(int(case["N"]), blocks[1])
    return replace(needs, ctas=ctas)


def traffic(inputs: Arguments) -> Traffic:
    """a once, an expert's matrix once per group of its row panels, without reuse from L2."""
    a, b, offsets, config = inputs.a, inputs.b, inputs.offsets, inputs.config
    _, K, N = b.shape
    reads = sum(cdiv(own, config.block_m * config.group_m) for own in group_rows(offsets))
    return Traffic(nbytes(a, offsets) + reads * K * N * b.element_size(), a.shape[0] * N * a.element_size())


def stages_that_fit(stage_bytes: int, bytes_beside: int) -> int:
    """Stages of the deepest ring, at most eight, that an SM's shared memory holds in addition to `bytes_beside`."""
    return min((SHARED_BYTES_PER_CTA - BARRIERS_BYTES - bytes_beside) // stage_bytes, MOST_STAGES)


Config = TypeVar("Config", bound=Tiled)


def least_work(candidates: Sequence[Config], case: Case) -> Config:
    """The config that gives the busiest SM the least work, operands included, the first of equals: a prediction,
    unmeasured.  It assumes that each expert with rows leaves half a tile empty.
    """
    T, E, N = int(case["T"]), int(case["E"]), int(case["N"])
    used = min(T, E)

    def weight(config: Config) -> int:
        whole = max(float(used), T / config.block_m + (used / 2 if T > used * config.block_m / 2 else 0))
        waves = cdiv(round(whole * cdiv(N, config.block_n)), HOPPER_SMS)
        return int(waves) * (config.block_m * config.block_n + OPERAND_WEIGHT * (config.block_m + config.block_n))

    return min(candidates, key=weight)


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
