"""Over tensor_core: the tiles of the next products travel to shared memory during a product.

The device code is the same.  Triton's software pipelining (`num_stages` of 2 or more) turns its loads into cp.async,
which copies to shared memory, that many stages ahead, without registers.  A load stays a plain load if it is narrower
than 4 bytes, the least of cp.async: rows that are not contiguous, or not a multiple of 16 elements apart.

The PTX ISA requires a proxy fence between cp.async and a wgmma that reads its data.  Triton 3.7 puts one into the loop,
Triton 3.6 does not (read in the PTX; the emulator reports a race), here and in split_k and stream_k from 64 rows on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rooflab.kernels.gemm._tiled import _gemm, by_fma, by_pointers, tile_footprint, traffic, uses_wgmma
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
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


# A decode batch fits one tile of 16 rows, the least of mma.sync; then only the bytes in flight matter.
DECODE = Config(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
# 64 rows are the least of wgmma.
SMALL = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3)
LARGE = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
FULL_PRECISION = Config(block_m=32, block_n=64, block_k=16, num_warps=4, num_stages=2)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles up to what two warpgroups hold in registers, with pipelines of several depths."""
    if by_fma(scheme):
        sides = itertools.product((16, 32, 64), (32, 64, 128), (16, 32))
    else:
        sides = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128))
    return tuple(
        Config(block_m, block_n, block_k, num_warps, num_stages, group_m)
        for block_m, block_n, block_k in sides
        for num_warps, num_stages, group_m in itertools.product((4, 8), (2, 3, 4, 5), (1, 8))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b for every allocated stage.

    wgmma reads a stage while others are filled.  mma.sync copies a stage to registers and frees it at once, so Triton
    allocates one stage fewer (read in the compiled kernels; tests/test_configs.py compares them).
    """
    stages = config.num_stages if uses_wgmma(config.block_m, scheme) else config.num_stages - 1
    blocks = config.block_m, config.block_n, config.block_k
    return tile_footprint(blocks, config.num_warps, stages, case, scheme)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One of the configs above, by the rows of a."""
    M = int(case["M"])
    if by_fma(scheme):
        return FULL_PRECISION
    return DECODE if M <= 16 else SMALL if M <= 64 else LARGE


@kernel(
    backend="triton",
    traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint),
    bind=by_pointers,
    fenced_since="3.7",
)
def pipelined(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: Config, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual on the tensor cores, in fp32; fp32 operands by FMAs unless `precision` is `tf32`."""
    grid, numbers, constants = bound
    _gemm[grid](a, b, bias, residual, c, *numbers, **constants)
