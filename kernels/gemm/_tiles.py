"""Defines tiles of matrix products: configs to try, default configs, resources of a CTA, and the order of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import BARRIER_BYTES
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 24
"""Registers per thread for pointers, masks and the loop counter, besides the accumulators."""
WGMMA_ROWS = 64
"""The least rows of a wgmma product.  In smaller tiles, warps multiply 16 rows by mma.sync."""


@dataclass(frozen=True)
class StreamTile(LaunchConfig):
    """A config: the tile sizes, the number of warps, and the number of pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class Config(StreamTile):
    """A config: the tile sizes, the number of warps, the number of pipeline stages, and the order of the tiles."""

    group_m: int = 8
    """The number of row panels of tiles that share their columns of `b` in L2."""


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Returns the row and the column of tile number `tile`.  A group has GROUP_M rows of tiles.  Within a group the row
    changes fastest, so CTAs that run at once share rows and columns in L2."""
    group_tiles = GROUP_M * tiles_n
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_tiles % group_m, tile % group_tiles // group_m


def by_fma(scheme: Scheme) -> bool:
    """Returns whether threads multiply by FMAs.  This is so for exact fp32, which the tensor cores cannot multiply."""
    return scheme.activation == torch.float32 and scheme.name != "tf32"


def tensor_cores(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns the value `tensor_cores`, which selects default configs: 0 if threads multiply by FMAs, else 1."""
    return {"tensor_cores": int(not by_fma(scheme))}


def outputs(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns `{"outputs": M * N}`.  A table selects default configs by this number of output elements."""
    return {"outputs": int(case["M"]) * int(case["N"])}


def at_both_widths(*rows: tuple[Mapping[str, int], Any]) -> tuple[tuple[Mapping[str, int], Any], ...]:
    """Returns a table of default configs for 16-bit and for 32-bit dtypes.  `rows` holds the table's rows for 16 bits.
    For 32 bits, the same rows follow with half of `block_k`.  A row may hold a tuple of configs; then each config gets
    a row."""
    table = [(caps, config) for caps, entry in rows for config in (entry if isinstance(entry, tuple) else (entry,))]
    fp32_rows = [(caps, replace(config, block_k=config.block_k // 2)) for caps, config in table]
    return (*(({**caps, "itemsize": 2}, config) for caps, config in table), *fp32_rows)


TileSizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Three lists of a tile's sizes: rows, columns and K.  Every combination is a config to try."""


def space(
    of: type, sides: TileSizes, exact: TileSizes | None = None, *, in_bytes: bool = False, **options: tuple[Any, ...]
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function that makes the configs to try, objects of the class `of`.

    The configs combine all tile sizes and all values of `options`. `sides` lists the tile sizes along M, N and K. If
    `in_bytes` is True, the sizes along K are in bytes. Products by FMAs use the sizes in `exact`, if given, and not
    those in `sides`."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Any, ...]:
        tile_sizes = exact if exact is not None and by_fma(scheme) else sides
        k_divisor = scheme.activation.itemsize if in_bytes else 1
        return tuple(
            of(rows, columns, k_size // k_divisor, **dict(zip(options, option_values, strict=True)))
            for rows, columns, k_size in itertools.product(*tile_sizes)
            for option_values in itertools.product(*options.values())
        )

    return configs


def tile_footprint(
    config: Any, columns: int, tiles: int, case: Case, scheme: Scheme, *, barriers: int = 0, sums: int = 1
) -> Footprint:
    """Returns the resources of a CTA that computes a tile of `columns` columns.  The grid has `tiles` CTAs.

    A pipeline stage in shared memory holds a tile of `a`, a tile of `b`, and `barriers` barriers.  Each output takes
    `sums` fp32 registers.  Without wgmma, Triton allocates one stage fewer.  Compiled kernels show this, and
    tests/contracts/test_configs.py checks it."""
    thread_count, outputs, uses_fma = 32 * config.num_warps, config.block_m * columns, by_fma(scheme)
    stage_values, stages = (config.block_m + columns) * config.block_k, config.num_stages
    register_values = sums * outputs + (stage_values if uses_fma else 0)
    kept_stages = max(stages - 1, 1) if uses_fma or config.block_m < WGMMA_ROWS else stages
    shared_bytes = kept_stages * stage_values * scheme.activation.itemsize + stages * barriers * BARRIER_BYTES
    flops = 2.0 * outputs * cdiv(int(case["K"]), config.block_k) * config.block_k
    return Footprint(thread_count, cdiv(register_values, thread_count) + ADDRESS_REGISTERS, shared_bytes, tiles, flops)


def one_wave(needs: Footprint, more_shared_bytes: int = 0) -> Footprint:
    """Returns the resources of a persistent kernel, whose CTAs (at most one per SM) all run at once.  `needs` holds the
    resources of the same kernel with one CTA per tile.  A persistent CTA takes `more_shared_bytes` more."""
    ctas = min(needs.ctas, HOPPER_SMS)
    flops = needs.tensor_flops * needs.ctas / max(1, ctas)
    return replace(needs, ctas=ctas, tensor_flops=flops, shared_bytes=needs.shared_bytes + more_shared_bytes)


def by_pointers(config: Any, case: Case, scheme: Scheme = BF16, **more: int) -> Footprint:
    """Returns the resources of a CTA that loads by pointers.  Each stage has a tile of `a` and a tile of `b`."""
    tiles_total = cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)
    return tile_footprint(config, config.block_n, tiles_total, case, scheme, **more)


by_tma = partial(by_pointers, barriers=1)
"""The footprint function of rungs that load by TMA: `by_pointers`, with a barrier per stage."""


def tma_space(of: type, rows: tuple[int, ...] = (64, 128, 256), **options: Any) -> Callable[..., Any]:
    """Returns a function that makes the configs to try with TMA.  A tile has 128 or 256 bytes along K."""
    tile_sizes = rows, (32, 64, 128, 256), (128, 256)
    return space(of, tile_sizes, in_bytes=True, num_stages=(2, 3, 4, 6), group_m=(1, 8, 16), **options)


_pointer_space = partial(
    space,
    Config,
    ((16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128)),
    ((16, 32, 64), (32, 64, 128), (16, 32)),
    num_warps=(4, 8),
    group_m=(1, 8),
)
_ROW_DEFAULTS: tuple[tuple[Mapping[str, int], Config], ...] = (
    # FMAs hold both tiles in registers, and larger tiles spill.
    ({"tensor_cores": 0}, Config(32, 64, 16, 4, 2)),
    # A decode batch fits 16 rows, the least of mma.sync; then only the bytes in flight matter.
    ({"M": 16}, Config(16, 64, 128, 4, 4)),
    ({"M": 64}, Config(64, 128, 64, 4, 3)),  # the least rows of wgmma
    ({}, Config(128, 128, 64, 8, 3)),
)
TENSOR_CORE = Tuning(
    Config,
    _pointer_space(num_stages=(1,)),
    Defaults(tuple((most, replace(config, num_stages=1)) for most, config in _ROW_DEFAULTS), tensor_cores),
    by_pointers,
)
PIPELINED = Tuning(Config, _pointer_space(num_stages=(2, 3, 4, 5)), Defaults(_ROW_DEFAULTS, tensor_cores), by_pointers)
# By TMA, 128 bytes along K; unmeasured.  Few rows of a take narrow tiles, so that more SMs have one.
# As deep as half of an SM's shared memory allows, so that a second CTA hides the epilogue of the first; tiles of 256
# columns take all of it.
TMA = Tuning(
    Config,
    tma_space(Config, num_warps=(4, 8)),
    Defaults(
        at_both_widths(
            ({"M": 256, "N": 4096}, Config(64, 32, 64, 4, 8, 32)),
            ({"M": 256, "N": 6144}, Config(64, 64, 64, 4, 6, 32)),
            ({"M": 256, "N": 32768}, Config(64, 256, 64, 4, 5, 32)),
            ({"M": 256, "N": 65536}, Config(64, 128, 64, 4, 4, 32)),
            ({"M": 256}, Config(64, 256, 64, 4, 5, 32)),
            ({"outputs": 524288}, Config(64, 64, 64, 4, 6, 32)),
            ({"outputs": 2097152}, Config(128, 128, 64, 8, 3, 16)),
            ({}, Config(128, 256, 64, 8, 4, 16)),
        ),
        outputs,
    ),
    by_tma,
)


few_space = partial(
    space,
    sides=((16, 32, 64), (32, 64, 128), (128, 256)),
    exact=((16, 32), (16, 32, 64), (64, 128)),
    in_bytes=True,
    num_warps=(4, 8),
)


def few_rows(of: type, columns: int, stages: tuple[int, int, int], exact: int) -> Defaults:
    """Returns a table of default configs, objects of the class `of`, for a matrix `a` with few rows.

    On tensor cores, a tile has 16, 32 or 64 rows of `a`, and `columns` columns of `b`.  `stages` holds the numbers of
    pipeline stages for these three heights.  Exact fp32 products need FMAs: a tile then has 16 or 32 rows and 32
    columns.  `exact` is the number of stages of these tiles."""
    return Defaults(
        at_both_widths(
            ({"tensor_cores": 0, "M": 16}, of(16, 32, 64, 4, exact)),
            ({"tensor_cores": 0}, of(32, 32, 64, 4, exact)),
            ({"M": 16}, of(16, columns, 128, 4, stages[0])),
            ({"M": 32}, of(32, columns, 128, 4, stages[1])),
            ({}, of(64, columns, 64, 4, stages[2])),
        ),
        tensor_cores,
    )
