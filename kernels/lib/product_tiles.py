"""Tiles of products, which gemm, gemm_silu_and_mul, gemm_grouped and gemm_fp8 share: configs, and what a CTA needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
RING_THREADS = 384
"""Two consumers and the warpgroup of the producer warp, because setmaxnreg moves registers between warpgroups."""


@dataclass(frozen=True)
class StreamTile(LaunchConfig):
    """A tile, and the depth of its pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class Config(StreamTile):
    """A tile, its pipeline, and the order of tiles."""

    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


@dataclass(frozen=True)
class Ring(LaunchConfig):
    """A tile of two consumers, and the ring that a producer fills."""

    block_m: int
    """Each consumer takes half."""
    block_n: int
    block_k: int
    stages: int
    """Slots of the ring."""
    group_m: int
    """Row panels of tiles that share their columns of B in L2."""
    store_n: int
    """Columns of a finished tile that are staged at once: all, or half if the ring needs the memory."""


def by_fma(scheme: Scheme) -> bool:
    """Whether threads multiply by FMAs: the tensor cores have no exact fp32."""
    return scheme.activation == torch.float32 and scheme.name != "tf32"


def tensor_cores(case: Case, scheme: Scheme) -> dict[str, int]:
    """`sizes` of a table of defaults: 0 where threads multiply by FMAs."""
    return {"tensor_cores": int(not by_fma(scheme))}


def at_both_widths(*rows: tuple[Mapping[str, int], Any]) -> tuple[tuple[Mapping[str, int], Any], ...]:
    """Rows of defaults for 16 bits, and the same for 32 bits, where a tile along K has half as many values; a row with
    several configs stands for one row with each."""
    each = [(most, config) for most, found in rows for config in (found if isinstance(found, tuple) else (found,))]
    wide = [(most, replace(config, block_k=config.block_k // 2)) for most, config in each]
    return (*(({**most, "itemsize": 2}, config) for most, config in each), *wide)


Sides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Rows, columns and K of tiles: every combination is worth a try."""


def space(
    of: type, sides: Sides, exact: Sides | None = None, *, in_bytes: bool = False, **options: tuple[Any, ...]
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


def staged(config: Any, scheme: Scheme) -> int:
    """Tiles of a and b in shared memory.

    wgmma reads a stage while others are filled.  mma.sync and FMAs copy a stage to registers and free it at once, so
    Triton allocates one stage fewer (read in the compiled kernels; tests/test_configs.py compares them).
    """
    stages: int = config.num_stages
    return stages if config.block_m >= WGMMA_ROWS and not by_fma(scheme) else max(stages - 1, 1)


def tile_footprint(
    config: Any, columns: int, tiles: int, case: Case, scheme: Scheme, *, barriers: int = 0, sums: int = 1
) -> Footprint:
    """What a CTA needs for each of `tiles` tiles of `columns` columns: its staged tiles of a and b, and `barriers` for
    each stage; `sums` fp32 values for each output in registers, and without tensor cores both tiles."""
    threads, outputs = 32 * config.num_warps, config.block_m * columns
    values = (config.block_m + columns) * config.block_k
    held = sums * outputs + (values if by_fma(scheme) else 0)
    shared = staged(config, scheme) * values * scheme.activation.itemsize + config.num_stages * barriers * BARRIER_BYTES
    flops = 2.0 * outputs * cdiv(int(case["K"]), config.block_k) * config.block_k
    return Footprint(threads, cdiv(held, threads) + ADDRESS_REGISTERS, shared, tiles, flops)


def one_wave(needs: Footprint, more_shared_bytes: int = 0) -> Footprint:
    """The needs if at most one CTA per SM walks over the tiles, with more shared memory."""
    ctas = min(needs.ctas, HOPPER_SMS)
    flops = needs.tensor_flops * needs.ctas / max(1, ctas)
    return replace(needs, ctas=ctas, tensor_flops=flops, shared_bytes=needs.shared_bytes + more_shared_bytes)


def ring_footprint(
    config: Any, columns: int, tiles: int, case: Case, scheme: Scheme, *, kept: int,
    stages: int | None = None, turns: bool = False, barriers: int = 3,
) -> Footprint:  # fmt: skip
    """What a producer and two consumers need, at most one CTA per SM, for `tiles` tiles of `columns` columns.

    A consumer has an fp32 accumulator of half a tile, or with `turns` of a whole one.  Shared memory holds the ring, of
    which a stage has one `full` barrier and one `empty` barrier for each consumer, and `kept` values of the result.
    """
    slots, outputs = stages or config.stages, config.block_m * columns
    values = slots * (config.block_m + columns) * config.block_k + kept
    registers = outputs // (128 if turns else 256) + ADDRESS_REGISTERS
    shared = values * scheme.activation.itemsize + slots * barriers * BARRIER_BYTES
    flops = 2.0 * outputs * cdiv(int(case["K"]), config.block_k) * config.block_k
    return one_wave(Footprint(RING_THREADS, registers, shared, tiles, flops))
