"""Tiles of gemm's Triton rungs: what a CTA needs, tables and spaces that several share, and those of three rungs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.lib import product_tiles as shared
from rooflab.kernels.lib.product_tiles import Config, StreamTile, at_both_widths, by_fma, space, tensor_cores
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme


def tile_count(config: Any, case: Case) -> int:
    """Tiles of the result."""
    return cdiv(int(case["M"]), config.block_m) * cdiv(int(case["N"]), config.block_n)


def by_pointers(config: StreamTile, case: Case, scheme: Scheme = BF16, barriers: int = 0) -> Footprint:
    """Tiles of a and b for every allocated stage."""
    return shared.tile_footprint(config, config.block_n, tile_count(config, case), case, scheme, barriers=barriers)


by_tma = partial(by_pointers, barriers=1)
"""And a barrier per stage."""


def sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """And the outputs."""
    return {"outputs": int(case["M"]) * int(case["N"]), **tensor_cores(case, scheme)}


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
BY_TMA: shared.Sides = (64, 128, 256), (32, 64, 128, 256), (128, 256)
tma_space = partial(space, in_bytes=True, num_stages=(2, 3, 4, 6), group_m=(1, 8, 16))


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
    Config, tma_space(Config, BY_TMA, num_warps=(4, 8)),
    Defaults(at_both_widths(
        ({"M": 256, "N": 4096}, Config(64, 32, 64, 4, 8, 32)), ({"M": 256, "N": 6144}, Config(64, 64, 64, 4, 6, 32)),
        ({"M": 256, "N": 32768}, Config(64, 256, 64, 4, 5, 32)),
        ({"M": 256, "N": 65536}, Config(64, 128, 64, 4, 4, 32)), ({"M": 256}, Config(64, 256, 64, 4, 5, 32)),
        ({"outputs": 524288}, Config(64, 64, 64, 4, 6, 32)), ({"outputs": 2097152}, Config(128, 128, 64, 8, 3, 16)),
        ({}, Config(128, 256, 64, 8, 4, 16)),
    ), sizes), by_tma,
)  # fmt: skip
