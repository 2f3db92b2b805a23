"""The tiles of gemm's Triton rungs: what a CTA needs, what is legal, and at the end a row of defaults for each rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.gemm._tiles import (
    RING_THREADS,
    ROW_BYTES,
    Config,
    Sides,
    StreamTile,
    at_both_widths,
    by_fma,
    one_wave,
    space,
    staged,
    tensor_cores,
    tile_footprint,
)
from rooflab.kernels.tuning import BF16, SHARED_BYTES_PER_CTA, Defaults, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

LEAST_STORE_COLUMNS = 64
"""Least columns of a part, if there are several: 128 bytes per row in 16 bits."""
MOST_EXCHANGED = 128 * 128
"""Values that Triton exchanges at once (read in the compiled kernels; tests/test_gemm_ladder.py compares them)."""
WARP_ROWS = 16
"""Rows of a warp, of the 64 of a wgmma."""
CONSUMER_WARPS = 8
SPECIALIZED_BARRIERS = 6
"""A stage's: full and empty, for both halves of a and for b (read in the compiled kernels)."""
LEAST_CTAS = 3 * HOPPER_SMS // 4
"""With fewer CTAs too many SMs are idle; with this many the busy SMs use the bandwidth of the idle ones."""
LEAST_STEPS = 4
"""Tiles of K per share: with fewer, a CTA ends before its loads overlap."""
BYTES_IN_FLIGHT = 64 * 1024
"""Per CTA: three times what HBM's latency needs per SM (3.35 TB/s times 0.7 us are 18 KB for each of 132 SMs)."""


@dataclass(frozen=True)
class SplitTile(StreamTile):
    """And the number of CTAs that share its K."""

    split: int = 1


@dataclass(frozen=True)
class TileInParts(Config):
    """And how it is stored."""

    store_parts: int = 1
    """Parts of a tile's columns that are stored one after another: 1, 2 or 4."""


def by_pointers(config: StreamTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b for every allocated stage."""
    blocks = config.block_m, config.block_n, config.block_k
    return tile_footprint(blocks, config.num_warps, staged(config, scheme), case, scheme)


def by_tma(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b and a barrier per stage."""
    blocks, stages = (config.block_m, config.block_n, config.block_k), config.num_stages
    return tile_footprint(blocks, config.num_warps, stages, case, scheme, more_shared_bytes=stages * BARRIER_BYTES)


def in_parts(config: TileInParts, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b and a barrier per stage, and a part of the result; at most one CTA per SM.

    Threads exchange a part of the residual through more shared memory, at most `MOST_EXCHANGED` values at once.  They
    also exchange a whole tile that is divided into parts if several warps share its rows.
    """
    outputs, size = config.block_m * config.block_n, scheme.output.itemsize
    part = outputs // config.store_parts * size
    exchanged = min(part, MOST_EXCHANGED * size) if case.get("residual") else 0
    if config.store_parts > 1 and config.block_m < WARP_ROWS * config.num_warps:
        exchanged = max(exchanged, outputs * size)
    needs = by_tma(config, case, scheme)
    return one_wave(replace(needs, shared_bytes=needs.shared_bytes + part + exchanged))


def specialized(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Accumulators of the consumers; tiles of a and b, their barriers, and the result; at most one CTA per SM."""
    result = config.block_m * config.block_n * scheme.output.itemsize
    blocks = config.block_m, config.block_n, config.block_k
    more = config.num_stages * SPECIALIZED_BARRIERS * BARRIER_BYTES + result
    needs = tile_footprint(blocks, CONSUMER_WARPS, config.num_stages, case, scheme, more_shared_bytes=more)
    return replace(one_wave(needs), threads=RING_THREADS)


def is_specialized(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits and has 4 warps: with another number Triton ignores `warp_specialize`."""
    return config.num_warps == 4 and config.block_m >= 128 and specialized(config, case, scheme).fits


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


def _sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """And the outputs."""
    return {"outputs": int(case["M"]) * int(case["N"]), **tensor_cores(case, scheme)}


def _or_fewer_stages(*rows: tuple[dict[str, int], TileInParts]) -> list[tuple[dict[str, int], TileInParts]]:
    """Each row also with one and two stages less, whose memory a residual takes."""
    return [(most, replace(c, num_stages=c.num_stages - fewer)) for most, c in rows for fewer in range(3)]


def skinny_tile(M: int, scheme: Scheme) -> Sides:
    """Sides near the heuristic's, which is the second of the columns and the last along K: the least rows of a product,
    and 256 bytes of each row of the weight (128 bytes if the tile of a is as large as the weight's)."""
    if by_fma(scheme):
        return (16 if M <= 16 else 32,), (16, 32, 64), (16, 32)
    block_m = min(max(next_power_of_2(M), 16), 64)
    block_k = (256 if block_m < 64 else 128) // scheme.activation.itemsize
    return (block_m,), (32, 64, 128), (block_k // 2, block_k)


def skinny_space(of: type, **options: tuple[int, ...]) -> Callable[..., tuple[Any, ...]]:
    """Tiles near the heuristic's, for few rows of a."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        return space(of, skinny_tile(int(case["M"]), scheme), None, in_bytes=False, **options)(case, scheme)

    return configs


def share_steps(K: int, config: SplitTile) -> int:
    """Tiles of K per share; the last share may have fewer."""
    return cdiv(cdiv(K, config.block_k), config.split)


def tile_steps(K: int, config: StreamTile) -> int:
    """Tiles of K; one empty tile if K is 0."""
    return max(cdiv(K, config.block_k), 1)


def shared_k(config: SplitTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Needs of split_k's first launch, where each CTA takes a share of a tile's K."""
    needs = by_pointers(config, case, scheme)
    depth = share_steps(int(case["K"]), config) * config.block_k
    return replace(needs, ctas=needs.ctas * config.split, tensor_flops=2.0 * config.block_m * config.block_n * depth)


def is_shared_k(config: SplitTile, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits and every share of K has a tile of K."""
    whole = config.split == 1 or config.split * config.block_k <= int(case["K"])
    return whole and shared_k(config, case, scheme).fits


def _least_split(case: Case, scheme: Scheme = BF16) -> SplitTile:
    """The least split that fills the SMs, with `BYTES_IN_FLIGHT` of the weight, or fewer: two CTAs fit on an SM."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    (block_m,), (_, block_n, _), (*_, block_k) = skinny_tile(M, scheme)
    tiles, split = cdiv(M, block_m) * cdiv(N, block_n), 1
    while tiles * split < LEAST_CTAS and split < 16 and (split + 1) * LEAST_STEPS * block_k <= K:
        split += 1
    stages = 3 if by_fma(scheme) else 1 + BYTES_IN_FLIGHT // (block_n * block_k * scheme.activation.itemsize)
    config = SplitTile(block_m, block_n, block_k, 4, stages, split)
    while not by_fma(scheme) and by_pointers(config, case, scheme).shared_bytes > SHARED_BYTES_PER_CTA // 2 - 1024:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def streamed(config: StreamTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Needs of stream_k's first launch, where each CTA takes a share of all steps.

    A tile from tensor cores passes through more shared memory when it is stored, in parts or whole (read in the
    compiled kernels; tests/test_gemm_hopper.py compares them).
    """
    needs, outputs = by_pointers(config, case, scheme), config.block_m * config.block_n
    steps = needs.ctas * tile_steps(int(case["K"]), config)
    ctas = max(min(HOPPER_SMS, steps), 1)
    more = 0 if by_fma(scheme) else 4 * outputs
    flops = 2.0 * outputs * config.block_k * steps / ctas
    return replace(needs, shared_bytes=needs.shared_bytes + more, ctas=ctas, tensor_flops=flops)


def _whole_sm(case: Case, scheme: Scheme = BF16) -> StreamTile:
    """split_k's tile, twice as wide, with the memory of a whole SM, because each SM has one CTA.

    The number of tiles need not fit the SMs, so tiles are wide: the loop then finds the place of fewer steps.
    """
    (block_m,), columns, (*_, block_k) = skinny_tile(int(case["M"]), scheme)
    config = StreamTile(block_m, columns[1 if by_fma(scheme) else 2], block_k, 4, 3)
    while config.num_stages < 8 and streamed(replace(config, num_stages=config.num_stages + 1), case, scheme).fits:
        config = replace(config, num_stages=config.num_stages + 1)
    return config


_SIDES: Sides = (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128)
_EXACT: Sides = (16, 32, 64), (32, 64, 128), (16, 32)
_BY_TMA: Sides = (64, 128, 256), (32, 64, 128, 256), (ROW_BYTES, 2 * ROW_BYTES)
_tma_space = partial(space, in_bytes=True, num_warps=(4, 8), num_stages=(2, 3, 4, 6))


def _stored_in_parts(case: Case, scheme: Scheme = BF16) -> tuple[TileInParts, ...]:
    """Parts have 128 bytes per row in 16 bits, if there are several."""
    every = _tma_space(TileInParts, _BY_TMA, store_parts=(1, 2, 4), group_m=(1, 8, 16))(case, scheme)
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
    Config, _tma_space(Config, _BY_TMA, group_m=(1, 8, 16)),
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
    Defaults(at_both_widths(*_or_fewer_stages(
        ({"M": 256, "N": 4096}, TileInParts(64, 32, 64, 4, 8, 32, 1)),
        ({"M": 256, "N": 6144}, TileInParts(64, 64, 64, 4, 8, 32, 1)),
        ({"M": 256, "N": 32768}, TileInParts(64, 256, 64, 4, 4, 32, 2)),
        ({"M": 256, "N": 65536}, TileInParts(64, 128, 64, 4, 8, 32, 1)),
        ({"M": 256}, TileInParts(64, 256, 64, 4, 4, 32, 2)),
        ({"outputs": 524288}, TileInParts(64, 64, 64, 4, 8, 32, 1)),
        ({"outputs": 2097152}, TileInParts(128, 128, 64, 8, 6, 16, 2)),
        ({}, TileInParts(128, 256, 64, 8, 4, 16, 4)),
    )), _sizes), in_parts,
)  # fmt: skip
# As many stages as fit with the result; where that is too large in 32 bits, 128 columns.
_NARROWER = Config(128, 128, 64, 4, 4, 16)
WARP_SPECIALIZED = Tuning(
    Config, _tma_space(Config, ((128, 256), *_BY_TMA[1:]), num_warps=(4,), group_m=(1, 8, 16)),
    Defaults(at_both_widths(
        ({"M": 256, "N": 4096}, Config(128, 32, 64, 4, 8, 16)), ({"M": 256, "N": 6144}, Config(128, 64, 64, 4, 8, 16)),
        ({"M": 256}, Config(128, 256, 64, 4, 3, 16)), ({"M": 256}, _NARROWER),
        ({"outputs": 524288}, Config(128, 32, 64, 4, 8, 16)), ({"outputs": 2097152}, Config(128, 128, 64, 4, 6, 16)),
        ({}, Config(128, 256, 64, 4, 3, 16)), ({}, _NARROWER),
    ), _sizes), specialized, is_specialized,
)  # fmt: skip
# For few rows of a.
SPLIT_K = Tuning(
    SplitTile, skinny_space(SplitTile, split=(1, 2, 3, 4, 6, 8, 16), num_warps=(4, 8), num_stages=(3, 4, 5, 6, 8)),
    _least_split, shared_k, is_shared_k,
)  # fmt: skip
STREAM_K = Tuning(
    StreamTile, skinny_space(StreamTile, num_warps=(4, 8), num_stages=(3, 4, 5, 6, 8, 12)), _whole_sm, streamed
)
