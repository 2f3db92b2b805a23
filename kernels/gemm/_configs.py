"""The tiles of gemm's Triton and Gluon rungs: what a CTA needs, what is legal, and at the end a row of each rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.lib import product_tiles as shared
from rooflab.kernels.lib.product_tiles import Config, StreamTile, at_both_widths, by_fma, one_wave, space, tensor_cores
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

LEAST_STORE_COLUMNS = 64
"""Least columns of a part, if there are several: 128 bytes per row in 16 bits."""
MOST_EXCHANGED = 128 * 128
"""Values that Triton exchanges at once (read in the compiled kernels; tests/test_gemm_ladder.py compares them)."""
WARP_ROWS = 16
"""Rows of a warp, of the 64 of a wgmma."""
SPECIALIZED_BARRIERS = 6
"""A stage's: full and empty, for both halves of a and for b (read in the compiled kernels)."""
DEEP_K = 2048
"""From this K on a fourth slot is predicted to gain more than staging a whole tile; unmeasured."""


@dataclass(frozen=True)
class TileInParts(Config):
    """And how it is stored."""

    store_parts: int = 1
    """Parts of a tile's columns that are stored one after another: 1, 2 or 4."""


@dataclass(frozen=True)
class RingTile(shared.Ring):
    """And how two consumers share the tensor cores."""

    lead: int = 0
    """Steps of K that the first consumer is ahead of the second, so that one stores while the other multiplies; each
    step costs a slot of the ring, which both hold."""
    turns: bool = False
    """Whether each consumer has whole tiles, and they multiply in turn."""


def tile_count(config: Any, case: Case) -> int:
    """Tiles of the result."""
    return cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)


def by_pointers(config: StreamTile, case: Case, scheme: Scheme = BF16, barriers: int = 0) -> Footprint:
    """Tiles of a and b for every allocated stage."""
    return shared.tile_footprint(config, config.block_n, tile_count(config, case), case, scheme, barriers=barriers)


by_tma = partial(by_pointers, barriers=1)
"""And a barrier per stage."""


def in_parts(config: TileInParts, case: Case, scheme: Scheme = BF16) -> Footprint:
    """And a part of the result; at most one CTA per SM.

    Threads exchange a part of the residual through more shared memory, at most `MOST_EXCHANGED` values at once.  They
    also exchange a whole tile that is divided into parts if several warps share its rows.
    """
    outputs, size = config.block_m * config.block_n, scheme.output.itemsize
    part = outputs // config.store_parts * size
    exchanged = min(part, MOST_EXCHANGED * size) if case.get("residual") else 0
    if config.store_parts > 1 and config.block_m < WARP_ROWS * config.num_warps:
        exchanged = max(exchanged, outputs * size)
    return one_wave(by_tma(config, case, scheme), part + exchanged)


def specialized(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Accumulators of the consumers; tiles of a and b, their barriers, and the result."""
    return shared.ring_footprint(
        config, config.block_n, tile_count(config, case), case, scheme, stages=config.num_stages,
        kept=config.block_m * config.block_n, barriers=SPECIALIZED_BARRIERS,
    )  # fmt: skip


def is_specialized(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits and has 4 warps: with another number Triton ignores `warp_specialize`."""
    return config.num_warps == 4 and config.block_m >= 128 and specialized(config, case, scheme).fits


def ring(config: RingTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """With the staged part of a tile, of both consumers with turns."""
    kept, tiles = config.block_m * config.store_n * (1 + config.turns), tile_count(config, case)
    return shared.ring_footprint(config, config.block_n, tiles, case, scheme, kept=kept, turns=config.turns)


def is_ring(config: RingTile, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits, tiles are staged whole or by halves, and the ring has at least two slots more than the lead,
    which is 0 with `turns`."""
    leads = config.lead == 0 or (config.lead + 2 <= config.stages and not config.turns)
    return leads and config.store_n in (config.block_n, config.block_n // 2) and ring(config, case, scheme).fits


def _sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """And the outputs; and K where a fourth slot of the ring may gain more than staging a whole tile: not with a
    residual, which would make the consumer wait."""
    deep = 0 if case.get("residual") else int(case["K"])
    return {"outputs": int(case["M"]) * int(case["N"]), "deep": deep, **tensor_cores(case, scheme)}


def _parts(*tile: int) -> tuple[TileInParts, ...]:
    """A tile, and with one and two stages less, whose memory a residual takes."""
    most = TileInParts(*tile)
    return tuple(replace(most, num_stages=most.num_stages - fewer) for fewer in range(3))


def _by_rows(decode: int, small: int, large: int, exact: int) -> Defaults:
    """One of four tiles by the rows of a, with these stages."""
    return Defaults((
        # FMAs hold both tiles in registers, and larger tiles spill.
        ({"tensor_cores": 0}, Config(32, 64, 16, 4, exact)),
        # A decode batch fits 16 rows, the least of mma.sync; then only the bytes in flight matter.
        ({"M": 16}, Config(16, 64, 128, 4, decode)),
        ({"M": 64}, Config(64, 128, 64, 4, small)),  # the least rows of wgmma
        ({}, Config(128, 128, 64, 8, large)),
    ), tensor_cores)  # fmt: skip


def few_rows(of: type, columns: int, stages: tuple[int, int, int], exact: int) -> Defaults:
    """For few rows of a: the least rows of a product, and 256 bytes of each row of the weight (128 bytes if the tile of
    a is as large as the weight's), with these stages."""
    return Defaults((
        ({"tensor_cores": 0, "M": 16}, of(16, 32, 32, 4, exact)), ({"tensor_cores": 0}, of(32, 32, 32, 4, exact)),
        *at_both_widths(
            ({"M": 16}, of(16, columns, 128, 4, stages[0])), ({"M": 32}, of(32, columns, 128, 4, stages[1])),
            ({}, of(64, columns, 64, 4, stages[2])),
        ),
    ), tensor_cores)  # fmt: skip


def of_least_rows(of: type, **options: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
    """Tiles of the least rows that hold all rows of a, if any do."""
    sides, exact = ((16, 32, 64), (32, 64, 128), (128, 256)), ((16, 32), (16, 32, 64), (64, 128))
    every = space(of, sides, exact, in_bytes=True, **options)

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        rows = min(max(next_power_of_2(int(case["M"])), 16), 32 if by_fma(scheme) else 64)
        return tuple(config for config in every(case, scheme) if config.block_m == rows)

    return configs


_SIDES: shared.Sides = (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128)
_EXACT: shared.Sides = (16, 32, 64), (32, 64, 128), (16, 32)
_BY_TMA: shared.Sides = (64, 128, 256), (32, 64, 128, 256), (128, 256)
_tma_space = partial(space, in_bytes=True, num_stages=(2, 3, 4, 6), group_m=(1, 8, 16))


def _stored_in_parts(case: Case, scheme: Scheme = BF16) -> tuple[TileInParts, ...]:
    """Parts have 128 bytes per row in 16 bits, if there are several."""
    every = _tma_space(TileInParts, _BY_TMA, num_warps=(4, 8), store_parts=(1, 2, 4))(case, scheme)
    return tuple(c for c in every if c.store_parts == 1 or c.block_n // c.store_parts >= LEAST_STORE_COLUMNS)


# Through pointers: stages of a decode batch, of few rows, of many rows, and of exact fp32.
TENSOR_CORE = Tuning(
    Config, space(Config, _SIDES, _EXACT, num_warps=(4, 8), num_stages=(1,), group_m=(1, 8)),
    _by_rows(1, 1, 1, 1), by_pointers,
)  # fmt: skip
PIPELINED = Tuning(
    Config, space(Config, _SIDES, _EXACT, num_warps=(4, 8), num_stages=(2, 3, 4, 5), group_m=(1, 8)),
    _by_rows(4, 3, 3, 2), by_pointers,
)  # fmt: skip
# By TMA, 128 bytes along K; unmeasured.  Few rows of a take narrow tiles, so that more SMs have one.
# As deep as half of an SM's shared memory allows, so that a second CTA hides the epilogue of the first; tiles of 256
# columns take all of it.
TMA = Tuning(
    Config, _tma_space(Config, _BY_TMA, num_warps=(4, 8)),
    Defaults(at_both_widths(
        ({"M": 256, "N": 4096}, Config(64, 32, 64, 4, 8, 32)), ({"M": 256, "N": 6144}, Config(64, 64, 64, 4, 6, 32)),
        ({"M": 256, "N": 32768}, Config(64, 256, 64, 4, 5, 32)),
        ({"M": 256, "N": 65536}, Config(64, 128, 64, 4, 4, 32)), ({"M": 256}, Config(64, 256, 64, 4, 5, 32)),
        ({"outputs": 524288}, Config(64, 64, 64, 4, 6, 32)), ({"outputs": 2097152}, Config(128, 128, 64, 8, 3, 16)),
        ({}, Config(128, 256, 64, 8, 4, 16)),
    ), _sizes), by_tma,
)  # fmt: skip
# As many stages as fit with a part of the result.
PERSISTENT = Tuning(
    TileInParts, _stored_in_parts,
    Defaults(at_both_widths(
        ({"M": 256, "N": 4096}, _parts(64, 32, 64, 4, 8, 32)), ({"M": 256, "N": 6144}, _parts(64, 64, 64, 4, 8, 32)),
        ({"M": 256, "N": 32768}, _parts(64, 256, 64, 4, 4, 32, 2)),
        ({"M": 256, "N": 65536}, _parts(64, 128, 64, 4, 8, 32)), ({"M": 256}, _parts(64, 256, 64, 4, 4, 32, 2)),
        ({"outputs": 524288}, _parts(64, 64, 64, 4, 8, 32)), ({"outputs": 2097152}, _parts(128, 128, 64, 8, 6, 16, 2)),
        ({}, _parts(128, 256, 64, 8, 4, 16, 4)),
    ), _sizes), in_parts,
)  # fmt: skip
# As many stages as fit with the result; where that is too large in 32 bits, 128 columns.
_WIDE = Config(128, 256, 64, 4, 3, 16), Config(128, 128, 64, 4, 4, 16)
WARP_SPECIALIZED = Tuning(
    Config, _tma_space(Config, ((128, 256), *_BY_TMA[1:]), num_warps=(4,)),
    Defaults(at_both_widths(
        ({"M": 256, "N": 4096}, Config(128, 32, 64, 4, 8, 16)), ({"M": 256, "N": 6144}, Config(128, 64, 64, 4, 8, 16)),
        ({"M": 256}, _WIDE), ({"outputs": 524288}, Config(128, 32, 64, 4, 8, 16)),
        ({"outputs": 2097152}, Config(128, 128, 64, 4, 6, 16)), ({}, _WIDE),
    ), _sizes), specialized, is_specialized,
)  # fmt: skip
# The most slots that fit, fewer in 32 bits.
_WHOLE = RingTile(128, 256, 64, 3, 16, 256)
_HALF = RingTile(128, 256, 64, 4, 16, 128), RingTile(128, 256, 64, 3, 16, 128)
COOPERATIVE = Tuning(
    RingTile,
    space(
        RingTile, ((128, 256), (64, 128, 256), (64, 128)), in_bytes=True, stages=(3, 4, 6, 8), group_m=(8, 16),
        store_n=(32, 64, 128, 256), lead=(0, 1, 2, 4), turns=(False, True),
    ),
    Defaults(at_both_widths(
        ({"M": 256, "N": 6144}, RingTile(128, 64, 64, 8, 16, 64)),
        ({"M": 256, "deep": DEEP_K - 1}, _WHOLE), ({"M": 256}, _HALF),
        ({"outputs": 524288}, RingTile(128, 64, 64, 8, 16, 64)),
        ({"outputs": 2097152}, (RingTile(128, 128, 64, 6, 16, 128), RingTile(128, 128, 64, 5, 16, 128))),
        ({"deep": DEEP_K - 1}, _WHOLE), ({}, _HALF),
    ), _sizes), ring, is_ring,
)  # fmt: skip
