"""What the TMA kernels share: tile sizes, their costs, checks, and the order of tiles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import map_maker
from rooflab.kernels.gemm_fp8._operands import block_scaled, why_no_tma
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

BLOCK_K = 128
"""K of a stage: 128 bytes are the widest swizzle of TMA and wgmma, and 128 values share a block scale."""
ADDRESS_REGISTERS = 12
"""Least registers for addresses, barriers and the loop counter, in addition to the accumulators."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options; the tile's K is 128."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of b in L2."""


def columns(M: int, N: int, block_m: int, widest: int) -> int:
    """Columns of the widest tile with which every SM of a Hopper has a tile, or 16."""
    for block_n in (256, 128, 64, 32):
        if block_n <= widest and cdiv(M, block_m) * cdiv(N, block_n) >= HOPPER_SMS:
            return block_n
    return 16


def _tuning(widest: int, accumulators: int, narrow: int, stages: int) -> Tuning:
    """Tiles of one or two warpgroups with up to `widest` columns, and `accumulators` fp32 registers per output.

    By default one warpgroup up to 64 rows, with up to `narrow` columns, else two, with these stages; the most columns
    with which every SM has a tile.
    """

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        options = itertools.product((4, 8), (3, 4, 5, 6, 8), (1, 8))
        every = itertools.product((64, 128), (16, 32, 64, 128, 256), options)
        return tuple(Config(m, n, *o) for m, n, o in every if n <= widest and (o[0] == 4 or m == 128))

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        M, N = int(case["M"]), int(case["N"])
        if M <= 64:
            return Config(64, columns(M, N, 64, narrow), num_warps=4, num_stages=6)
        return Config(128, columns(M, N, 128, widest), num_warps=8, num_stages=stages)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        threads, outputs = 32 * config.num_warps, config.block_m * config.block_n
        M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
        return Footprint(
            threads=threads,
            registers=accumulators * outputs // threads + ADDRESS_REGISTERS,
            shared_bytes=config.num_stages * (config.block_m + config.block_n) * BLOCK_K,
            ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n),
            tensor_flops=2.0 * outputs * cdiv(K, BLOCK_K) * BLOCK_K,
        )

    return Tuning(Config, configs, heuristic, footprint)


FAST_ACCUM = _tuning(widest=256, accumulators=1, narrow=128, stages=4)
"""The most columns of one wgmma."""
PROMOTED = _tuning(widest=128, accumulators=2, narrow=128, stages=5)
"""The columns of one block scale, for which two accumulators fit: fp8's for this 128 of K, and the fp32 one."""


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels without reuse from L2."""
    a, b, config = inputs.a, inputs.b, inputs.config
    M, N = a.shape[0], b.shape[1]
    panels = max(1, cdiv(M, config.block_m * config.group_m))
    return Traffic(nbytes(a, inputs.a_scale, inputs.b_scale, inputs.bias) + panels * nbytes(b), 2 * M * N)


def unsupported(inputs: Arguments) -> str | None:
    """Why TMA cannot read these operands, or None; None for empty ones, which no kernel reads."""
    a, b = inputs.a, inputs.b
    return why_no_tma(a, b) if a.numel() and b.numel() else None


def by_maps(of: Arguments) -> Any:
    """Of a layout: what makes the maps of a and b.mT, the grid, sizes and strides."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    a_map = map_maker(TensorDescriptor, [M, K], [of.a.stride(0), 1], [config.block_m, BLOCK_K])
    b_map = map_maker(TensorDescriptor, [N, K], [of.b.stride(1), 1], [config.block_n, BLOCK_K])
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    return a_map, b_map, grid, (M, N, K), scale_strides(of), of.c.stride(0)


def scale_strides(of: Arguments) -> tuple[int, ...]:
    """The strides of both block scales; zeros for one scale each."""
    return (*of.a_scale.stride(), *of.b_scale.stride()) if block_scaled(of.a_scale) else (0, 0, 0, 0)


@triton.jit
def place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of tile number `tile`, in groups of row panels that share their columns of b in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    group_tiles = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_tiles % group_m, tile % group_tiles // group_m
