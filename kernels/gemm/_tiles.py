"""What the tiles of all products share: a config, the space around it, what a CTA needs, and the choice by clocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 24
"""For pointers, masks and the loop counter, in addition to the accumulators."""
WGMMA_ROWS = 64
"""Rows of a wgmma product; in smaller tiles warps multiply 16 rows by mma.sync."""
ROW_BYTES = 128
"""Bytes of a tile along K: the widest swizzle, with which wgmma reads shared memory without bank conflicts."""
PRODUCT_BYTES_PER_CLOCK = 4096
"""Per SM, multiply-adds times operand bytes: 989 TFLOP/s in bf16 are 132 SMs at 1.83 GHz with 2048 multiply-adds."""
L2_BYTES_PER_CLOCK = 48
"""Assumed L2 bandwidth per SM, only for the choice between tiles; not measured.  Tiles of 128 x 256 need this much at
the full rate of 16-bit products; a published kernel with such tiles and no multicast reaches 86% (ThunderKittens).
Smaller tiles need more; no measurement shows that L2 delivers it."""
GROUP_ROWS = 2048
"""Rows of a per group of tiles: a wave of 132 tiles of 128 x 256 then reads 2048 rows and 2112 columns, near the
minimum; with 1024 rows it would read 4224 columns."""
RING_THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""
RING_BARRIERS = 3
"""A stage's: one `full`, and one `empty` per consumer."""


@dataclass(frozen=True)
class StreamTile(LaunchConfig):
    """A tile and its pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class Config(StreamTile):
    """And the order of tiles."""

    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


def by_fma(scheme: Scheme) -> bool:
    """Whether threads multiply by FMAs: the tensor cores have no exact fp32."""
    return scheme.activation == torch.float32 and scheme.name != "tf32"


def tensor_cores(case: Case, scheme: Scheme) -> dict[str, int]:
    """`sizes` of a table of defaults: 0 where threads multiply by FMAs."""
    return {"tensor_cores": int(not by_fma(scheme))}


def at_both_widths(*rows: tuple[Mapping[str, int], Any]) -> tuple[tuple[Mapping[str, int], Any], ...]:
    """Rows of defaults for 16 bits, and the same for 32 bits, where a tile along K has half as many values."""
    wide = [replace(config, block_k=config.block_k // 2) for _, config in rows]
    narrow = tuple(({**most, "itemsize": 2}, config) for most, config in rows)
    return (*narrow, *((most, config) for (most, _), config in zip(rows, wide, strict=True)))


def uses_wgmma(block_m: int, scheme: Scheme) -> bool:
    """Whether warpgroups multiply (wgmma)."""
    return block_m >= WGMMA_ROWS and not by_fma(scheme)


def staged(config: Any, scheme: Scheme) -> int:
    """Tiles of a and b in shared memory.

    wgmma reads a stage while others are filled.  mma.sync and FMAs copy a stage to registers and free it at once, so
    Triton allocates one stage fewer (read in the compiled kernels; tests/test_configs.py compares them).
    """
    stages: int = config.num_stages
    return stages if uses_wgmma(config.block_m, scheme) else max(stages - 1, 1)


Sides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rows, columns and K of tiles: every combination is worth a try."""


def space(
    of: type, sides: Sides, exact: Sides | None = None, *, in_bytes: bool = False, **options: tuple[int, ...]
) -> Callable[..., tuple[Any, ...]]:
    """Every combination of sides, or of `exact` for FMAs, and options; `in_bytes`: a side along K is in bytes."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        chosen = exact if exact is not None and by_fma(scheme) else sides
        unit = scheme.activation.itemsize if in_bytes else 1
        return tuple(
            of(rows, columns, depth // unit, **dict(zip(options, values, strict=True)))
            for rows, columns, depth in itertools.product(*chosen)
            for values in itertools.product(*options.values())
        )

    return configs


def tile_footprint(
    blocks: tuple[int, int, int],
    num_warps: int,
    staged_tiles: int,
    case: Case,
    scheme: Scheme,
    *,
    more_shared_bytes: int = 0,
) -> Footprint:
    """Needs of a tile: fp32 accumulators, without tensor cores both tiles in registers, and `staged_tiles` of a and b.

    `blocks`: M, N and K of a tile.
    """
    block_m, block_n, block_k = blocks
    threads = 32 * num_warps
    outputs = block_m * block_n
    tiles = (block_m + block_n) * block_k
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    return Footprint(
        threads=threads,
        registers=cdiv(outputs + (tiles if by_fma(scheme) else 0), threads) + ADDRESS_REGISTERS,
        shared_bytes=staged_tiles * tiles * scheme.activation.itemsize + more_shared_bytes,
        ctas=cdiv(M, block_m) * cdiv(N, block_n),
        tensor_flops=2.0 * outputs * cdiv(K, block_k) * block_k,
    )


def one_wave(needs: Footprint) -> Footprint:
    """The needs if at most one CTA per SM walks over the tiles."""
    ctas = min(needs.ctas, HOPPER_SMS)
    return replace(needs, ctas=ctas, tensor_flops=needs.tensor_flops * needs.ctas / max(1, ctas))


def ring_footprint(
    blocks: tuple[int, int, int],
    stages: int,
    staged_values: int,
    tiles: int,
    K: int,
    scheme: Scheme,
    *,
    turns: bool = False,
) -> Footprint:
    """Needs of a producer and two consumers, at most one CTA per SM: one fp32 accumulator per consumer, of half a tile
    or with `turns` of a whole one; the ring with its barriers, and the staged values of the result.

    `blocks`: M, N and K of a tile; `tiles`: their number.
    """
    block_m, block_n, block_k = blocks
    outputs = block_m * block_n
    values = stages * (block_m + block_n) * block_k + staged_values
    return one_wave(
        Footprint(
            threads=RING_THREADS,
            registers=outputs // (128 if turns else 256) + ADDRESS_REGISTERS,
            shared_bytes=values * scheme.activation.itemsize + stages * RING_BARRIERS * BARRIER_BYTES,
            ctas=tiles,
            tensor_flops=2.0 * outputs * cdiv(K, block_k) * block_k,
        )
    )


class Tiled(Protocol):
    """A config with tile sizes."""

    @property
    def block_m(self) -> int:
        """Rows per tile."""

    @property
    def block_n(self) -> int:
        """Columns per tile."""


AnyTile = TypeVar("AnyTile", bound=Tiled)


def quickest(candidates: Sequence[AnyTile], case: Case, scheme: Scheme) -> AnyTile:
    """The config whose tiles should take the fewest clocks, the first of equals: a prediction, not measured.

    A tile costs its products on the tensor cores or its loads from L2, whichever takes longer; a wave has one tile per
    SM and takes as long as one tile.
    """
    M, N = int(case["M"]), int(case["N"])
    size = scheme.activation.itemsize

    def clocks(config: AnyTile) -> float:
        waves = cdiv(cdiv(M, config.block_m) * cdiv(N, config.block_n), HOPPER_SMS)
        products = config.block_m * config.block_n * size / PRODUCT_BYTES_PER_CLOCK
        loads = (config.block_m + config.block_n) * size / L2_BYTES_PER_CLOCK
        return float(waves * max(products, loads))

    return min(candidates, key=clocks)
