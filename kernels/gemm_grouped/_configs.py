"""The tiles of gemm_grouped: how many the host launches, what a CTA needs, and a row of defaults for each rung.

The host knows neither the rows of an expert nor its row panels.  Expert e may use the panels from
floor(offsets[e] / BLOCK_M) + e on.  It needs at most floor(offsets[e + 1] / BLOCK_M) - floor(offsets[e] / BLOCK_M) + 1
panels, so no two experts share a panel, and T / BLOCK_M + E panels are enough; some stay empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiles import (
    ROW_BYTES,
    Config,
    at_both_widths,
    ring_footprint,
    space,
    staged,
    tensor_cores,
    tile_footprint,
)
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning
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


def _sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """And the average rows of an expert, the values of the result, and all columns of b."""
    T, E, N = int(case["T"]), int(case["E"]), int(case["N"])
    return {"rows": cdiv(T, max(1, E)), "outputs": T * N, "columns": E * N, **tensor_cores(case, scheme)}


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


# Every table is unmeasured.  Exact fp32 has no tensor core: FMAs hold both tiles in registers; larger tiles spill.
_EXACT = {"tensor_cores": 0}, Config(32, 64, 16, 4, 2)
GROUPED = Tuning(
    Config,
    space(
        Config, ((16, 32, 64, 128), (32, 64, 128, 256), (32, 64, 128, 256)), ((16, 32, 64), (32, 64, 128), (16, 32)),
        num_warps=(4, 8), num_stages=(2, 3, 4, 5), group_m=(1, 8, 16),
    ),
    Defaults((
        _EXACT,
        # Few rows fit a tile of mma.sync; then only the bytes in flight matter.
        ({"rows": 12}, Config(16, 64, 128, 4, 5)), ({"rows": 32}, Config(32, 64, 128, 4, 5)),
        ({"N": 1024}, Config(64, 128, 64, 4, 4)), ({"N": 2048}, Config(128, 256, 64, 8, 4)),
        ({"N": 3072}, Config(128, 128, 64, 8, 3)), ({}, Config(128, 256, 64, 8, 4)),
    ), _sizes), by_pointers,
)  # fmt: skip
TMA = Tuning(
    Config,
    space(
        Config, ((64, 128), (32, 64, 128, 256), (64, 128, 256)), ((32, 64), (32, 64, 128), (64, 128)), in_bytes=True,
        num_warps=(4, 8), num_stages=(2, 3, 4, 6, 8), group_m=(1, 8, 16),
    ),
    Defaults((
        _EXACT,
        ({"outputs": 4096}, Config(64, 32, 64, 4, 8)), ({"N": 136}, Config(64, 32, 64, 4, 8)),
        ({"outputs": 8192}, Config(64, 64, 64, 4, 6)), ({"E": 8, "rows": 4}, Config(64, 256, 64, 4, 2)),
        ({"T": 8}, Config(64, 128, 64, 4, 4)), ({"rows": 4}, Config(64, 256, 64, 4, 2)),
        ({"outputs": 65536}, Config(64, 32, 64, 4, 8)), ({"N": 2048, "rows": 128}, Config(128, 256, 64, 8, 4)),
        ({"outputs": 294912}, Config(64, 64, 64, 4, 6)), ({"T": 128}, Config(64, 256, 64, 4, 2)),
        ({"K": 576}, Config(128, 128, 64, 8, 3)), ({"K": 1024}, Config(128, 256, 64, 8, 4)),
        ({"T": 512}, Config(64, 128, 64, 4, 4)), ({}, Config(128, 256, 64, 8, 4)),
    ), _sizes), by_tma,
)  # fmt: skip
_LARGE = GroupedRing(128, 256, 64, 4, 128), GroupedRing(128, 256, 64, 3, 128)  # the second in 32 bits
_MIDDLE = GroupedRing(128, 128, 64, 6, 128), GroupedRing(128, 128, 64, 5, 128)
_SMALL = (GroupedRing(128, 64, 64, 8, 64),)
COOPERATIVE = Tuning(
    GroupedRing, _rings,
    Defaults(at_both_widths(*(
        (most, ring) for most, rings in (
            ({"outputs": 524288, "columns": 6144}, _SMALL), ({"T": 16, "E": 1}, _LARGE),
            ({"T": 8, "N": 2048}, _MIDDLE), ({"K": 4096, "rows": 128}, _LARGE), ({"T": 2}, _SMALL),
            ({"T": 128}, _LARGE), ({"N": 3072}, _MIDDLE), ({}, _LARGE),
        ) for ring in rings
    )), _sizes), _ring,
)  # fmt: skip
