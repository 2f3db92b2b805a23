"""The tiles of gemm_grouped: how many the host launches, what a CTA needs, and a row of defaults for each rung.

The host knows neither the rows of an expert nor its row panels.  Expert e may use the panels from
floor(offsets[e] / BLOCK_M) + e on.  It needs at most floor(offsets[e + 1] / BLOCK_M) - floor(offsets[e] / BLOCK_M) + 1
panels, so no two experts share a panel, and T / BLOCK_M + E panels are enough; some stay empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiles import (
    ROW_BYTES,
    AnyTile,
    Config,
    by_fma,
    ring_footprint,
    space,
    staged,
    stages_that_fit,
    tile_footprint,
    tile_work,
)
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


def panels(T: int, E: int, block_m: int) -> int:
    """Row panels that are enough for any T rows in E groups."""
    return T // block_m + E


def by_pointers(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """gemm's footprint, with a CTA for each possible tile."""
    product = Case(M=case["T"], N=case["N"], K=case["K"])
    blocks = config.block_m, config.block_n, config.block_k
    needs = tile_footprint(blocks, config.num_warps, staged(config, scheme), product, scheme)
    ctas = panels(int(case["T"]), int(case["E"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    return replace(needs, ctas=ctas)


def by_tma(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """And a barrier per stage."""
    needs = by_pointers(config, case, scheme)
    return replace(needs, shared_bytes=needs.shared_bytes + config.num_stages * BARRIER_BYTES)


def least_work(candidates: Sequence[AnyTile], case: Case) -> AnyTile:
    """The config that gives the busiest SM the least work, operands included, the first of equals: a prediction,
    unmeasured.  It assumes that each expert with rows leaves half a tile empty.
    """
    T, E, N = int(case["T"]), int(case["E"]), int(case["N"])
    used = min(T, E)

    def weight(config: AnyTile) -> int:
        whole = max(float(used), T / config.block_m + (used / 2 if T > used * config.block_m / 2 else 0))
        waves = cdiv(round(whole * cdiv(N, config.block_n)), HOPPER_SMS)
        return int(waves) * tile_work(config.block_m, config.block_n)

    return min(candidates, key=weight)


# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
_EXACT = Config(32, 64, 16, num_warps=4, num_stages=2)


def _by_rows(case: Case, scheme: Scheme = BF16) -> Config:
    """By the average rows of an expert; of wgmma's tiles the one with the least work for the busiest SM."""
    if by_fma(scheme):
        return _EXACT
    rows, depth = int(case["T"]) / max(1, int(case["E"])), 128 // scheme.activation.itemsize
    if rows <= 32:  # few rows fit a tile of mma.sync; then only the bytes in flight matter
        return Config(16 if rows <= 12 else 32, 64, 2 * depth, num_warps=4, num_stages=5)
    tiles = (128, 256, 8, 4), (128, 128, 8, 3), (64, 256, 4, 2), (64, 128, 4, 4)
    return least_work([Config(m, n, depth, warps, stages) for m, n, warps, stages in tiles], case)


def _by_work(case: Case, scheme: Scheme = BF16) -> Config:
    """The tile with the least work for the busiest SM, with as many stages as fit with as many CTAs per SM as registers
    allow."""
    if by_fma(scheme):
        return _EXACT
    block_k = ROW_BYTES // scheme.activation.itemsize
    tiles = (128, 256, 8, 4), (128, 128, 8, 3), (64, 256, 4, 2), (64, 128, 4, 4), (64, 64, 4, 6), (64, 32, 4, 8)
    return least_work([Config(m, n, block_k, warps, stages) for m, n, warps, stages in tiles], case)


@dataclass(frozen=True)
class GroupedRing(LaunchConfig):
    """A tile and the ring."""

    block_m: int
    """Each consumer takes half."""
    block_n: int
    block_k: int
    stages: int
    """Slots of the ring."""
    store_n: int
    """Columns of a finished tile that are staged at once: all, or half if the ring needs the memory."""
    group_m: int = 8
    """Row panels of an expert that share its columns of B in L2."""


def _rings(case: Case, scheme: Scheme = BF16) -> tuple[GroupedRing, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = ROW_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (32, 64, 128, 256), (depth // 2, depth), (3, 4, 6, 8), (1, 2), (4, 8, 16))
    return tuple(
        GroupedRing(block_m, block_n, block_k, stages, block_n // parts, group_m)
        for block_m, block_n, block_k, stages, parts, group_m in tiles
        if block_n // parts >= 32
    )


def _ring(config: GroupedRing, case: Case, scheme: Scheme = BF16) -> Footprint:
    """With the staged result."""
    tiles = panels(int(case["T"]), int(case["E"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    blocks, result = (config.block_m, config.block_n, config.block_k), config.block_m * config.store_n
    return ring_footprint(blocks, config.stages, result, tiles, int(case["K"]), scheme)


def _deepest(case: Case, scheme: Scheme = BF16) -> GroupedRing:
    """The tile with the least work for the busiest SM, with the most slots that fit."""
    size, found = scheme.activation.itemsize, []
    for m, n, store_n in (128, 256, 128), (128, 128, 128), (128, 64, 64):
        stages = stages_that_fit((m + n) * ROW_BYTES, m * store_n * size)
        found.append(GroupedRing(m, n, ROW_BYTES // size, stages, store_n))
    return least_work(found, case)


GROUPED = Tuning(
    Config,
    space(
        Config, ((16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128, 256)), ((16, 32, 64), (32, 64, 128), (16, 32)),
        num_warps=(4, 8), num_stages=(2, 3, 4, 5), group_m=(1, 8, 16),
    ), _by_rows, by_pointers,
)  # fmt: skip
TMA = Tuning(
    Config,
    space(
        Config, ((64, 128), (32, 64, 128, 256), (64, 128, 256)), ((32, 64), (32, 64, 128), (64, 128)), in_bytes=True,
        num_warps=(4, 8), num_stages=(2, 3, 4, 6, 8), group_m=(1, 8, 16),
    ), _by_work, by_tma,
)  # fmt: skip
COOPERATIVE = Tuning(GroupedRing, _rings, _deepest, _ring)
