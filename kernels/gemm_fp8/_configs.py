"""The tiles of gemm_fp8: what a CTA needs, and at the end a row of defaults for each rung."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import one_wave
from rooflab.kernels.tuning import BF16, REGISTERS_PER_SM, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme

BLOCK_K = 128
"""K of a stage: 128 bytes are the widest swizzle of TMA and wgmma, and 128 values share a block scale."""
ADDRESS_REGISTERS = 12
"""Least registers for addresses, barriers and the loop counter, in addition to the accumulators."""
SUM_REGISTERS = 16
"""Least registers of a consumer for addresses, barriers and scales, in addition to its accumulators."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options; the tile's K is 128."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of b in L2."""


@dataclass(frozen=True)
class ConsumerTile:
    """Tile sizes and depth of the ring; the tile's K is 128, and each 64 rows belong to a consumer."""

    block_m: int
    block_n: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of b in L2."""


def ring(
    config: Config | ConsumerTile, case: Case, threads: int, registers: int, more_shared_bytes: int = 0
) -> Footprint:
    """Needs of a CTA for each tile, with the tiles of a and b in every stage."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    return Footprint(
        threads=threads,
        registers=registers,
        shared_bytes=config.num_stages * (config.block_m + config.block_n) * BLOCK_K + more_shared_bytes,
        ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n),
        tensor_flops=2.0 * config.block_m * config.block_n * cdiv(K, BLOCK_K) * BLOCK_K,
    )


def _by_warps(accumulators: int) -> Callable[..., Footprint]:
    """`footprint` of one or two warpgroups that hold this many fp32 registers per output."""

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        threads = 32 * config.num_warps
        sums = accumulators * config.block_m * config.block_n
        return ring(config, case, threads, sums // threads + ADDRESS_REGISTERS)

    return footprint


def _tiles(widest: int) -> Callable[..., tuple[Config, ...]]:
    """Tiles of one or two warpgroups with up to `widest` columns."""
    columns = [n for n in (16, 32, 64, 128, 256) if n <= widest]
    sides = itertools.product((64, 128), columns, (4, 8), (3, 4, 5, 6, 8), (1, 8))
    every = tuple(Config(m, n, warps, *more) for m, n, warps, *more in sides if warps == 4 or m == 128)
    return lambda case, scheme=BF16: every


def by_consumers(config: ConsumerTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers at launch, which the kernel redistributes; the ring, and the tile that is stored; at most one CTA per
    SM.

    The producer is one warp, but counts as four, because registers are given to warpgroups.
    """
    threads = 128 * (config.block_m // 64 + 1)
    registers = min(REGISTERS_PER_SM // threads // 8 * 8, config.block_n + SUM_REGISTERS)
    return one_wave(ring(config, case, threads, registers, 2 * config.block_m * config.block_n))


def _outputs(case: Case, scheme: Scheme) -> dict[str, int]:
    return {"outputs": int(case["M"]) * int(case["N"])}


# By rows and columns of the result; unmeasured.  With few of either, narrow tiles give more SMs a tile.
_ONE_WARPGROUP = (
    ({"M": 64, "N": 4096}, Config(64, 16, 4, 6)), ({"M": 64, "N": 7168}, Config(64, 32, 4, 6)),
    ({"M": 64}, Config(64, 128, 4, 6)),
)  # fmt: skip
FAST_ACCUM = Tuning(
    Config, _tiles(256), Defaults((
        *_ONE_WARPGROUP,
        ({"N": 4096, "outputs": 524288}, Config(128, 16, 8, 4)),
        ({"outputs": 917504}, Config(128, 32, 8, 4)),
        ({"M": 128}, Config(128, 128, 8, 4)),
        ({"outputs": 2097152}, Config(128, 64, 8, 4)),
        ({"N": 4096}, Config(128, 256, 8, 4)),
        ({"M": 512}, Config(128, 128, 8, 4)),
        ({}, Config(128, 256, 8, 4)),
    ), _outputs), _by_warps(accumulators=1),
)  # fmt: skip
"""Up to the most columns of one wgmma."""
PROMOTED = Tuning(
    Config, _tiles(128), Defaults((
        *_ONE_WARPGROUP,
        ({"N": 4096, "outputs": 524288}, Config(128, 16, 8, 5)),
        ({"K": 512}, Config(128, 128, 8, 5)),
        ({"outputs": 917504}, Config(128, 32, 8, 5)),
        ({"outputs": 2097152}, Config(128, 64, 8, 5)),
        ({}, Config(128, 128, 8, 5)),
    ), _outputs), _by_warps(accumulators=2),
)  # fmt: skip
"""Up to the columns of one block scale, for which two accumulators fit: fp8's for this 128 of K, and the fp32 one."""
PROMOTED_WS = Tuning(
    ConsumerTile,  # of one to three consumers, with tiles up to the columns of one block scale
    space(
        ConsumerTile, block_m=(64, 128, 192), block_n=(16, 32, 64, 128), num_stages=(3, 4, 5, 6, 8), group_m=(1, 4, 8)
    ),
    Defaults((
        ({"M": 64, "N": 4096}, ConsumerTile(64, 16, 8)), ({"M": 64, "N": 7168}, ConsumerTile(64, 32, 8)),
        ({"M": 64}, ConsumerTile(64, 128, 8)),
        ({"N": 4096, "outputs": 524288}, ConsumerTile(128, 16, 5)),
        ({"K": 512}, ConsumerTile(128, 128, 5)),
        ({"outputs": 917504}, ConsumerTile(128, 32, 5)),
        ({"outputs": 2097152}, ConsumerTile(128, 64, 5)),
        ({"outputs": 8388608}, ConsumerTile(128, 128, 5)),
        ({"outputs": 12582912}, ConsumerTile(192, 128, 4)),  # three consumers fill the last wave better
        ({}, ConsumerTile(128, 128, 5)),
    ), _outputs), by_consumers,
)  # fmt: skip
