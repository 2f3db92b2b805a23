"""How gemm's CUDA C++ rungs for few rows of a divide the weight, and at the end a row for each rung."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._skinny_operands import VECTOR_BYTES
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

MOST_ROWS = 4
"""Rows of a in gemv: each costs one FMA per weight; with more rows tensor cores are cheaper."""
WARPS = 8
WARPS_PER_SM = 24
"""Warps per SM that gemv's heuristic aims at: with 8 vectors of 512 bytes each, 96 KB are in flight."""
WARP = 32
LOADERS = 128 + 32
"""Threads that load the weight, and a; for each 64 rows of the weight 128 more threads multiply."""
PIECE_BYTES = 128
"""Bytes of a row along K: the widest swizzle."""
MOST_COLUMNS = 64
"""Rows of a per tile; each further tile of rows reads the weight again."""
RING_BYTES = 112 * 1024
"""Half of an SM's shared memory: two CTAs fit, and a single one keeps over 80 KB in flight."""
LEAST_CTAS = 9 * HOPPER_SMS // 10


@dataclass(frozen=True)
class GemvConfig:
    """How warps and CTAs divide the weight."""

    rows: int
    """Rows of the weight per warp; they share the loads of a."""
    unroll: int
    """Vectors of each row that are loaded at once."""
    warps_k: int
    """Warps of a CTA that share a row; each takes every `warps_k * split`-th piece of 32 vectors."""
    split: int
    """CTAs of a cluster that share a row."""


def _divisions(case: Case, scheme: Scheme = BF16) -> tuple[GemvConfig, ...]:
    """Many ways to divide N and K; `_is_division` keeps those with at most 16 vectors in flight per thread."""
    return tuple(itertools.starmap(GemvConfig, itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))))


def pieces(K: int, scheme: Scheme) -> int:
    """Loads of a whole warp per row of K, with the widest vector."""
    return int(cdiv(K * scheme.activation.itemsize, WARP * VECTOR_BYTES))


def by_vectors(config: GemvConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers for the vectors in flight and the sums; shared memory for one sum per warp, row and row of a."""
    M, N = int(case["M"]), int(case["N"])
    sums = config.rows * min(M, MOST_ROWS)
    return Footprint(
        threads=WARPS * WARP,
        registers=config.rows * config.unroll * VECTOR_BYTES // 4 + sums + 8,
        shared_bytes=4 * WARPS * sums,
        ctas=cdiv(N, config.rows * (WARPS // config.warps_k)) * config.split,
    )


def _is_division(config: GemvConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """At most 16 vectors in flight per thread, and at least one piece per share of K."""
    shares = config.warps_k * config.split
    return (
        config.rows * config.unroll <= 16
        and (shares == 1 or shares <= pieces(int(case["K"]), scheme))
        and by_vectors(config, case, scheme).fits
    )


def _fewest_shares(case: Case, scheme: Scheme = BF16) -> GemvConfig:
    """The fewest shares of K that give every SM its warps, but no more than K has pieces."""
    N, most = int(case["N"]), pieces(int(case["K"]), scheme)
    rows = 2 if int(case["M"]) <= 2 else 4
    wanted = HOPPER_SMS * WARPS_PER_SM * rows
    shares = 1
    while N * shares < wanted and 2 * shares <= min(most, WARPS * 8):
        shares *= 2
    return GemvConfig(rows, 8 // rows, warps_k=min(shares, WARPS), split=max(shares // WARPS, 1))


@dataclass(frozen=True)
class SwapAbConfig:
    """A tile, the depth of its ring, and the split of K."""

    block_m: int
    """Rows of a: the N of wgmma."""
    block_n: int
    """Rows of the weight: 64 per warpgroup."""
    block_k: int
    num_stages: int
    split: int
    """CTAs of a cluster, which share a tile's K."""


def _swapped_tiles(case: Case, scheme: Scheme = BF16) -> tuple[SwapAbConfig, ...]:
    """Tiles of one to four warpgroups, one or two pieces of 128 bytes deep, with rings up to an SM's memory."""
    piece = PIECE_BYTES // scheme.activation.itemsize
    sides = (_columns(case),), (64, 128, 256), (piece, 2 * piece)
    return tuple(itertools.starmap(SwapAbConfig, itertools.product(*sides, (3, 4, 5, 6, 8, 12), (1, 2, 4, 8))))


def _columns(case: Case) -> int:
    return min(max(int(next_power_of_2(int(case["M"]))), 8), MOST_COLUMNS)


def swapped(config: SwapAbConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """A ring of tiles in shared memory, reused for the sums; accumulators in registers."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    depth = cdiv(cdiv(K, config.block_k), config.split) * config.block_k
    tile = (config.block_m + config.block_n) * config.block_k
    return Footprint(
        threads=LOADERS + 2 * config.block_n,
        registers=config.block_m // 2 + 24,
        shared_bytes=config.num_stages * tile * scheme.activation.itemsize,
        ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n) * config.split,
        tensor_flops=2.0 * config.block_m * config.block_n * depth,
    )


def _is_swapped(config: SwapAbConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, every share of K has a tile of K, and the ring has room for the sums.

    A thread's rows must be 8 or 16 apart, so that their swizzle is the same: tiles are one or two pieces deep.
    """
    needs = swapped(config, case, scheme)
    if config.block_k * scheme.activation.itemsize not in (PIECE_BYTES, 2 * PIECE_BYTES):
        return False
    room = config.block_m * (config.block_n + 4) * 4 <= needs.shared_bytes
    return room and needs.fits and (config.split == 1 or config.split * config.block_k <= int(case["K"]))


def _one_wave_of_two(case: Case, scheme: Scheme = BF16) -> SwapAbConfig:
    """Tiles of 128 rows if the tile of a is worth sharing, then the least split that gives every SM a CTA.

    If possible all CTAs run at once, two per SM: they share the bandwidth, so one more CTA on some SMs costs nothing,
    but a second wave would.
    """
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    block_m = _columns(case)
    block_n = 128 if block_m > 16 or N >= 128 * HOPPER_SMS else 64
    piece = PIECE_BYTES // scheme.activation.itemsize
    # Longer runs of a row, if four stages or more still fit.
    block_k = 2 * piece if block_m + block_n <= 96 else piece
    tiles = cdiv(M, block_m) * cdiv(N, block_n)
    split = 1
    while tiles * split < LEAST_CTAS and split < 8 and 8 * split * block_k <= K:
        split *= 2
    stage = (block_m + block_n) * block_k * scheme.activation.itemsize
    return SwapAbConfig(block_m, block_n, block_k, min(RING_BYTES // stage, 8), split)


GEMV = Tuning(GemvConfig, _divisions, _fewest_shares, by_vectors, _is_division)
SWAP_AB = Tuning(SwapAbConfig, _swapped_tiles, _one_wave_of_two, swapped, _is_swapped)
