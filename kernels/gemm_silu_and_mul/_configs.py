"""The tiles of gemm_silu_and_mul: what a CTA needs, and a row of defaults for each rung."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiles import (
    ROW_BYTES,
    by_fma,
    one_wave,
    ring_footprint,
    space,
    staged,
    stages_that_fit,
    tile_footprint,
    tile_work,
)
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options."""

    block_m: int
    block_i: int
    """Columns of gate, and the same number of up."""
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


def by_pointers(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """gemm's footprint for 2 I columns."""
    product = Case(M=case["M"], N=2 * int(case["I"]), K=case["K"])
    blocks = config.block_m, 2 * config.block_i, config.block_k
    return tile_footprint(blocks, config.num_warps, staged(config, scheme), product, scheme)


def by_tma(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """And a barrier per stage."""
    needs = by_pointers(config, case, scheme)
    return replace(needs, shared_bytes=needs.shared_bytes + config.num_stages * BARRIER_BYTES)


def with_result(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """And a tile of the result; at most one CTA per SM."""
    needs = by_tma(config, case, scheme)
    result = config.block_m * config.block_i * scheme.output.itemsize
    return one_wave(replace(needs, shared_bytes=needs.shared_bytes + result))


class TiledPair(Protocol):
    """A config with tile sizes."""

    @property
    def block_m(self) -> int:
        """Rows per tile."""

    @property
    def block_i(self) -> int:
        """Columns of gate per tile, and as many of up."""


AnyPair = TypeVar("AnyPair", bound=TiledPair)


def least_work(candidates: Sequence[AnyPair], case: Case) -> AnyPair:
    """The config that gives the busiest SM the least work, operands included, the first of equals: a prediction,
    unmeasured."""
    M, I = int(case["M"]), int(case["I"])

    def weight(config: AnyPair) -> int:
        waves = cdiv(cdiv(M, config.block_m) * cdiv(I, config.block_i), HOPPER_SMS)
        return int(waves) * tile_work(config.block_m, 2 * config.block_i)

    return min(candidates, key=weight)


# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
_EXACT = Config(32, 32, 16, num_warps=4, num_stages=2)


def _by_rows(case: Case, scheme: Scheme = BF16) -> Config:
    """By the rows of a; tiles of half the size if large ones leave SMs without a tile."""
    M, I, depth = int(case["M"]), int(case["I"]), 128 // scheme.activation.itemsize
    if by_fma(scheme):
        return _EXACT
    if M <= 32:  # a decode batch fits rows of mma.sync; then only the bytes in flight matter: 200 KB for two CTAs
        config = Config(16 if M <= 16 else 32, 32, 2 * depth, num_warps=4, num_stages=5)
    elif M > 64 and M * I >= HOPPER_SMS * 128 * 128:
        return Config(128, 128, depth, num_warps=8, num_stages=4, group_m=16)
    else:  # 64 rows are the least of wgmma
        config = Config(64, 64, depth, num_warps=4, num_stages=4)
    return replace(config, block_i=config.block_i // 2) if M <= 64 and I < HOPPER_SMS * config.block_i else config


def _by_work(case: Case, scheme: Scheme = BF16) -> Config:
    """The tile with the least work for the busiest SM, with as many stages as fit with as many CTAs per SM as registers
    allow."""
    if by_fma(scheme):
        return _EXACT
    block_k = ROW_BYTES // scheme.activation.itemsize
    tiles = (128, 128, 8, 4), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 4), (64, 32, 4, 6), (64, 16, 4, 8)
    return least_work([Config(m, i, block_k, warps, stages) for m, i, warps, stages in tiles], case)


def _deepest(case: Case, scheme: Scheme = BF16) -> Config:
    """The tile with the least work for the busiest SM, with as many stages as fit with the result."""
    if by_fma(scheme):
        return replace(_EXACT, group_m=16)
    size, found = scheme.activation.itemsize, []
    for m, i, warps in (128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (64, 32, 4), (64, 16, 4):
        stages = stages_that_fit((m + 2 * i) * ROW_BYTES, m * i * scheme.output.itemsize)
        found.append(Config(m, i, ROW_BYTES // size, warps, stages, group_m=16))
    return least_work(found, case)


@dataclass(frozen=True)
class PairRing(LaunchConfig):
    """A tile and the ring."""

    block_m: int
    """Each consumer takes half."""
    block_i: int
    """Columns of gate, and the same number of up."""
    block_k: int
    stages: int
    """Slots of the ring."""
    group_m: int = 16
    """Row panels of tiles that share their columns of B in L2."""
    lead: int = 0
    """Steps of K that the first consumer is ahead of the second, so that one activates while the other multiplies; each
    step costs a slot of the ring, which both hold."""


def _rings(case: Case, scheme: Scheme = BF16) -> tuple[PairRing, ...]:
    """Tiles that two consumers can hold in registers, with rings of several depths."""
    depth = ROW_BYTES // scheme.activation.itemsize
    tiles = itertools.product((128, 256), (32, 64, 128), (depth // 2, depth), (4, 8, 16))
    return tuple(
        PairRing(block_m, block_i, block_k, stages, group_m, lead)
        for block_m, block_i, block_k, group_m in tiles
        for stages, lead in ((3, 0), (4, 0), (4, 1), (6, 0), (6, 2), (8, 0), (8, 4))
    )


def _ring(config: PairRing, case: Case, scheme: Scheme = BF16) -> Footprint:
    """With the staged result."""
    tiles = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["I"]), config.block_i)
    blocks, result = (config.block_m, 2 * config.block_i, config.block_k), config.block_m * config.block_i
    return ring_footprint(blocks, config.stages, result, tiles, int(case["K"]), scheme)


def _is_ring(config: PairRing, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, and the ring has at least two slots more than the lead."""
    return _ring(config, case, scheme).fits and (config.lead == 0 or config.lead + 2 <= config.stages)


def _deepest_ring(case: Case, scheme: Scheme = BF16) -> PairRing:
    """The tile with the least work for the busiest SM, with as many slots as fit with the result."""
    size, found = scheme.activation.itemsize, []
    for m, i in (128, 128), (256, 64), (128, 64), (128, 32):
        found.append(PairRing(m, i, ROW_BYTES // size, stages_that_fit((m + 2 * i) * ROW_BYTES, m * i * size)))
    return least_work(found, case)


FUSED = Tuning(
    Config,
    space(
        Config, ((16, 32, 64, 128, 256), (16, 32, 64, 128), (32, 64, 128, 256)), ((16, 32, 64), (16, 32, 64), (16, 32)),
        num_warps=(4, 8), num_stages=(2, 3, 4, 5), group_m=(1, 8, 16),
    ), _by_rows, by_pointers,
)  # fmt: skip
TMA = Tuning(
    Config,
    space(
        Config, ((64, 128, 256), (16, 32, 64, 128), (64, 128, 256)), ((32, 64), (16, 32, 64), (64, 128)), in_bytes=True,
        num_warps=(4, 8), num_stages=(2, 3, 4, 6, 8), group_m=(1, 8, 16),
    ), _by_work, by_tma,
)  # fmt: skip
PERSISTENT = Tuning(
    Config,
    space(
        Config, ((64, 128, 256), (16, 32, 64, 128), (128, 256)), ((32, 64), (16, 32, 64), (64, 128)), in_bytes=True,
        num_warps=(4, 8), num_stages=(2, 3, 4, 5, 6, 8), group_m=(1, 8, 16),
    ), _deepest, with_result,
)  # fmt: skip
COOPERATIVE = Tuning(PairRing, _rings, _deepest_ring, _ring, _is_ring)
