"""The tiles of gemm_silu_and_mul: what a CTA needs, and a row of defaults for each Triton rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiles import ROW_BYTES, by_fma, one_wave, space, staged, stages_that_fit, tile_footprint
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

OPERAND_WEIGHT = 64
"""Cost of each operand value that a tile reads per k, in products, for the choice between tiles: a guess by which
128 x 128 tiles take 8/7 of the time of 128 x 256 tiles for the same work; unmeasured."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options."""

    block_m: int
    block_i: int
    """Columns of gate, and as many of up."""
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
        return int(waves) * (
            2 * config.block_m * config.block_i + OPERAND_WEIGHT * (config.block_m + 2 * config.block_i)
        )

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
