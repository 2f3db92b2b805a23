"""The tiles of gemm_fp8: what a CTA needs, and at the end a row of defaults for each rung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import one_wave
from rooflab.kernels.tuning import BF16, REGISTERS_PER_SM, Footprint, LaunchConfig, Tuning
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


def columns(M: int, N: int, block_m: int, widest: int) -> int:
    """Columns of the widest tile with which every SM of a Hopper has a tile, or 16."""
    for block_n in (256, 128, 64, 32):
        if block_n <= widest and cdiv(M, block_m) * cdiv(N, block_n) >= HOPPER_SMS:
            return block_n
    return 16


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


def _tuning(widest: int, accumulators: int, narrow: int, stages: int) -> Tuning:
    """Tiles of one or two warpgroups with up to `widest` columns, and `accumulators` fp32 registers per output.

    By default one warpgroup up to 64 rows, with up to `narrow` columns, else two, with these stages; the most columns
    with which every SM has a tile.
    """

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        options = itertools.product((4, 8), (3, 4, 5, 6, 8), (1, 8))
        every = itertools.product((64, 128), (16, 32, 64, 128, 256), options)
        return tuple(Config(m, n, *o) for m, n, o in every if n <= widest and (o[0] == 4 or m == 128))

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        M, N = int(case["M"]), int(case["N"])
        if M <= 64:
            return Config(64, columns(M, N, 64, narrow), num_warps=4, num_stages=6)
        return Config(128, columns(M, N, 128, widest), num_warps=8, num_stages=stages)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        threads = 32 * config.num_warps
        sums = accumulators * config.block_m * config.block_n
        return ring(config, case, threads, sums // threads + ADDRESS_REGISTERS)

    return Tuning(Config, configs, heuristic, footprint)


def _consumer_tiles(case: Case, scheme: Scheme = BF16) -> tuple[ConsumerTile, ...]:
    """One to three consumers, with tiles up to the columns of one block scale."""
    sides = itertools.product((64, 128, 192), (16, 32, 64, 128), (3, 4, 5, 6, 8), (1, 4, 8))
    return tuple(itertools.starmap(ConsumerTile, sides))


def by_consumers(config: ConsumerTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers at launch, which the kernel redistributes; the ring, and the tile that is stored; at most one CTA per
    SM.

    The producer is one warp, but counts as four, because registers are given to warpgroups.
    """
    threads = 128 * (config.block_m // 64 + 1)
    registers = min(REGISTERS_PER_SM // threads // 8 * 8, config.block_n + SUM_REGISTERS)
    return one_wave(ring(config, case, threads, registers, 2 * config.block_m * config.block_n))


def _fullest_wave(case: Case, scheme: Scheme = BF16) -> ConsumerTile:
    """Rows: two or three consumers, whichever fills the last wave better, or one for M <= 64; columns: the most with
    which every SM has a tile."""
    M, N = int(case["M"]), int(case["N"])
    if M <= 64:
        return ConsumerTile(64, columns(M, N, 64, 128), num_stages=8)
    block_n = columns(M, N, 128, 128)

    def turns(block_m: int) -> int:
        """Rows that the busiest SM multiplies."""
        tiles = cdiv(M, block_m) * cdiv(N, block_n)
        return int(block_m * cdiv(tiles, HOPPER_SMS))

    # The larger tile reads a sixth less from L2 per FLOP, so it is better if both take equally long.
    if turns(192) <= turns(128):
        return ConsumerTile(192, block_n, num_stages=4)
    return ConsumerTile(128, block_n, num_stages=5)


FAST_ACCUM = _tuning(widest=256, accumulators=1, narrow=128, stages=4)
"""The most columns of one wgmma."""
PROMOTED = _tuning(widest=128, accumulators=2, narrow=128, stages=5)
"""The columns of one block scale, for which two accumulators fit: fp8's for this 128 of K, and the fp32 one."""
PROMOTED_WS = Tuning(ConsumerTile, _consumer_tiles, _fullest_wave, by_consumers)
