"""Over naive: the tensor cores multiply one tile of K at a time.

Tiles are visited in groups of row panels, so a group's panels of A stay in L2 while it reads its columns of B (the tile
order of Triton's matmul tutorial).  Each tile of K is loaded when the product before it is done.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rooflab.kernels.gemm._tiled import _gemm, by_fma, by_pointers, tile_footprint, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


# A decode batch fits one tile of 16 rows, the least of mma.sync.
DECODE = Config(block_m=16, block_n=64, block_k=128, num_warps=4)
# 64 rows are the least of wgmma.
SMALL = Config(block_m=64, block_n=128, block_k=64, num_warps=4)
LARGE = Config(block_m=128, block_n=128, block_k=64, num_warps=8)
# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
FULL_PRECISION = Config(block_m=32, block_n=64, block_k=16, num_warps=4)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles up to what two warpgroups hold in registers."""
    if by_fma(scheme):
        sides = itertools.product((16, 32, 64), (32, 64, 128), (16, 32))
    else:
        sides = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128))
    return tuple(
        Config(block_m, block_n, block_k, num_warps, group_m=group_m)
        for block_m, block_n, block_k in sides
        for num_warps, group_m in itertools.product((4, 8), (1, 8))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One tile of a and b in shared memory."""
    blocks = config.block_m, config.block_n, config.block_k
    return tile_footprint(blocks, config.num_warps, 1, case, scheme)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One of the configs above, by the rows of a."""
    M = int(case["M"])
    if by_fma(scheme):
        return FULL_PRECISION
    return DECODE if M <= 16 else SMALL if M <= 64 else LARGE


@kernel(backend="triton", traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint), bind=by_pointers)
def tensor_core(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: Config, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual on the tensor cores, in fp32; fp32 operands by FMAs unless `precision` is `tf32`."""
    grid, numbers, constants = bound
    _gemm[grid](a, b, bias, residual, c, *numbers, **constants)
