"""Over tma: one CTA per SM walks over tiles, and its loads of the next tile start before it has stored the last tile.

A tile with 128 rows and 256 columns of gate and up takes the registers of an SM, so no other CTA hides the fill of its
pipeline or its activation.  Here both loops are fused into one (`flatten`), and the loads run on across tiles.  The
last wave of tiles takes as long as before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiled import by_fma, grouped_tile, uses_wgmma
from rooflab.kernels.gemm._tma import ROW_BYTES
from rooflab.kernels.gemm_silu_and_mul._maps import by_maps, least_work, stages_that_fit, why_no_maps, zeros
from rooflab.kernels.gemm_silu_and_mul._tiled import gated_footprint, silu_product, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options."""

    block_m: int
    block_i: int
    """Columns of gate, and as many of up."""
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 16
    """Row panels of tiles that share their columns of B in L2."""


CANDIDATES = ((128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4), (64, 16, 4))
"""block_m, block_i and num_warps."""
# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
FULL_PRECISION = Config(block_m=32, block_i=32, block_k=16, num_warps=4, num_stages=2)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles for wgmma, up to what two warpgroups hold in registers, with pipelines of several depths."""
    if by_fma(scheme):
        sides = itertools.product((32, 64), (16, 32, 64), (64, 128))
    else:
        sides = itertools.product((64, 128, 256), (16, 32, 64, 128), (ROW_BYTES, 2 * ROW_BYTES))
    return tuple(
        Config(block_m, block_i, row_bytes // scheme.activation.itemsize, num_warps, num_stages, group_m)
        for block_m, block_i, row_bytes in sides
        for num_warps, num_stages, group_m in itertools.product((4, 8), (2, 3, 4, 5, 6, 8), (1, 8, 16))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b and a barrier per stage, and a tile of the result; at most one CTA per SM."""
    stages = config.num_stages if uses_wgmma(config.block_m, scheme) else config.num_stages - 1
    blocks = config.block_m, config.block_i, config.block_k
    more = config.num_stages * BARRIER_BYTES + config.block_m * config.block_i * scheme.output.itemsize
    needs = gated_footprint(blocks, config.num_warps, stages, case, scheme, more_shared_bytes=more)
    tiles, ctas = needs.ctas, min(needs.ctas, HOPPER_SMS)
    return replace(needs, ctas=ctas, tensor_flops=needs.tensor_flops * tiles / max(1, ctas))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The one of `CANDIDATES` with the least work for the busiest SM, with as many stages as fit with the result."""
    if by_fma(scheme):
        return FULL_PRECISION

    def deepest(block_m: int, block_i: int, num_warps: int) -> Config:
        stages = stages_that_fit((block_m + 2 * block_i) * ROW_BYTES, block_m * block_i * scheme.output.itemsize)
        return Config(block_m, block_i, ROW_BYTES // scheme.activation.itemsize, num_warps, stages)

    return least_work([deepest(*candidate) for candidate in CANDIDATES], case)


@triton.jit
def _gemm(
    a_map, b_map, out_map, M, I, K,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_i = tl.cdiv(M, BLOCK_M), tl.cdiv(I, BLOCK_I)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)  # the compiler fuses the loops only if the inner loop always runs
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_i, tl.num_programs(0), flatten=True):
        tile_m, tile_i = grouped_tile(tile, tiles_m, tiles_i, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_i * BLOCK_I
        accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_I), dtype=tl.float32)
        for step in range(steps):
            k = step * BLOCK_K
            a = a_map.load([row, k])
            b = b_map.load([0, column, k]).reshape(2 * BLOCK_I, BLOCK_K).T
            accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        out_map.store([row, column], silu_product(accumulator).to(out_map.dtype))


@kernel(
    backend="triton", min_sm=90, unsupported=why_no_maps, aligned=("a", "b"), empty=zeros, bind=by_maps,
    traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def persistent(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """silu(a gate) * (a up), summed in fp32 and rounded once; TMA loads the operands and stores the result."""
    a_map, b_map, out_map, sizes = bound
    tiles = cdiv(sizes[0], config.block_m) * cdiv(sizes[1], config.block_i)
    grid = (min(tiles, sm_count(a.device)),)
    _gemm[grid](a_map(a), b_map(b), out_map(out), *sizes, **config.launch_arguments)
