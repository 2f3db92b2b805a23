"""Defines the configs to try and the default configs of gemm_silu_and_mul's Triton kernels, and a CTA's resources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import one_wave, space, tensor_cores, tile_footprint
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """A config: the tile sizes and the launch options."""

    block_m: int
    block_i: int
    """The number of columns of gate in a tile.  The tile has as many columns of up."""
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """The number of row panels of tiles that share their columns of `b` in L2."""


def tile_count(config: Any, case: Case) -> int:
    """Returns the number of tiles of the result."""
    return cdiv(int(case["M"]), config.block_m) * cdiv(int(case["I"]), config.block_i)


def by_pointers(config: Config, case: Case, scheme: Scheme = BF16, barriers: int = 0) -> Footprint:
    """Returns the resources of a CTA.  Its tile has `block_i` columns of `gate` and as many columns of `up`.
    `barriers` is the number of mbarriers per pipeline stage: 0 for loads by pointers, 1 for loads by TMA."""
    return tile_footprint(config, 2 * config.block_i, tile_count(config, case), case, scheme, barriers=barriers)


by_tma = partial(by_pointers, barriers=1)
"""The footprint function of rungs that load by TMA: `by_pointers`, with a barrier per stage."""


def with_result(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA that loads by TMA, and the number of CTAs (at most one per SM).  Shared memory
    holds the loaded tiles and a tile of the result."""
    return one_wave(by_tma(config, case, scheme), config.block_m * config.block_i * scheme.output.itemsize)


def _sizes(case: Case, scheme: Scheme) -> dict[str, int]:
    """Returns the sizes that select a default config.  `outputs` is the number of elements of the result.
    `tensor_cores` is 1 if tensor cores multiply, and 0 if FMAs do."""
    return {"outputs": int(case["M"]) * int(case["I"]), **tensor_cores(case, scheme)}


# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
_FP32_ROW_KEY = {"tensor_cores": 0}
_LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": (4, 8), "group_m": (1, 8, 16)}
# By the rows of a and the columns of gate; unmeasured.  Smaller tiles where large ones would leave SMs without one.
FUSED = Tuning(
    Config,
    space(
        Config,
        ((16, 32, 64, 128, 256), (16, 32, 64, 128), (32, 64, 128, 256)),
        ((16, 32, 64), (16, 32, 64), (16, 32)),
        num_stages=(2, 3, 4, 5),
        **_LAUNCH_OPTIONS,
    ),
    Defaults(
        (
            (_FP32_ROW_KEY, Config(32, 32, 16, 4, 2)),
            # A decode batch fits rows of mma.sync; then only the bytes in flight matter: 200 KB for two CTAs.
            ({"M": 16, "I": 4223}, Config(16, 16, 128, 4, 5)),
            ({"M": 16}, Config(16, 32, 128, 4, 5)),
            ({"M": 32, "I": 4223}, Config(32, 16, 128, 4, 5)),
            ({"M": 32}, Config(32, 32, 128, 4, 5)),
            ({"M": 64, "I": 8447}, Config(64, 32, 64, 4, 4)),
            ({"M": 64}, Config(64, 64, 64, 4, 4)),
            ({"outputs": 132 * 128 * 128 - 1}, Config(64, 64, 64, 4, 4)),
            ({}, Config(128, 128, 64, 8, 4, 16)),
        ),
        _sizes,
    ),
    by_pointers,
)
_TMA_CONFIGS = space(
    Config,
    ((64, 128, 256), (16, 32, 64, 128), (128, 256)),
    ((32, 64), (16, 32, 64), (64, 128)),
    in_bytes=True,
    num_stages=(2, 3, 4, 5, 6, 8),
    **_LAUNCH_OPTIONS,
)
TMA = Tuning(
    Config,
    _TMA_CONFIGS,
    Defaults(
        (
            (_FP32_ROW_KEY, Config(32, 32, 16, 4, 2)),
            ({"M": 256, "I": 1536}, Config(64, 16, 64, 4, 8)),
            ({"M": 256, "I": 3072}, Config(64, 32, 64, 4, 6)),
            ({"M": 256}, Config(64, 128, 64, 4, 2)),
            ({"I": 1536}, Config(128, 64, 64, 8, 3)),
            ({}, Config(128, 128, 64, 8, 4)),
        ),
        _sizes,
    ),
    by_tma,
)
PERSISTENT = Tuning(
    Config,
    _TMA_CONFIGS,
    Defaults(
        (
            (_FP32_ROW_KEY, Config(32, 32, 16, 4, 2, 16)),
            ({"M": 256, "I": 1536}, Config(64, 16, 64, 4, 8, 16)),
            ({"M": 256, "I": 3072}, Config(64, 32, 64, 4, 8, 16)),
            ({"M": 256}, Config(64, 128, 64, 4, 5, 16)),
            ({"I": 1536}, Config(128, 64, 64, 8, 6, 16)),
            ({}, Config(128, 128, 64, 8, 4, 16)),
        ),
        _sizes,
    ),
    with_result,
)
