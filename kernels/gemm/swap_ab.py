"""Implements the kernel `swap_ab`, for a small batch.  It computes the transposed result C^T = W A^T.

The kernel improves on `split_k`.  wgmma computes 64 rows and a multiple of 8 columns.  So a batch of 1 is padded to 64
as rows, but only to 8 as columns (CUTLASS issue 1176 and DeepGEMM say the same).  If there are too few tiles for the
SMs, K is split over a cluster of CTAs.  Partial sums are added in a fixed order, without a second launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._pdl import pdl_is_on
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm import _operands
from rooflab.kernels.gemm._tiles import space
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme

SOURCE = Path(__file__).with_suffix(".cu").read_text()
LOAD_THREADS = 128 + 32
"""The threads that load: 128 for the weight, 32 for `a`.  Another 128 threads multiply each 64 rows of the weight."""
SWIZZLE_BYTES = 128
"""The bytes along K of a piece of a row: the widest swizzle."""
TILE_COLUMNS = (8, 16, 32, 64)
"""The possible numbers of rows of `a` per tile.  Each further tile of rows reads the weight again."""
RING_BYTES = 112 * 1024
"""The bytes of the ring, half of an SM's shared memory.  Two CTAs fit; a single CTA keeps over 80 KB in flight."""
LEAST_CTAS = 9 * HOPPER_SMS // 10


@dataclass(frozen=True)
class SwapAbConfig:
    """A config: the tile sizes, the slots of the ring buffer, and the number of CTAs among which K is split."""

    block_m: int
    """The number of rows of `a` in a tile: the N of wgmma."""
    block_n: int
    """The number of rows of the weight in a tile: 64 per warpgroup."""
    block_k: int
    num_stages: int
    split: int
    """The number of CTAs of a cluster, which share the K of a tile."""


def columns(case: Case) -> int:
    """Returns the number of rows of `a` per tile: M rounded up to a power of two, from 8 to 64."""
    return min(max(next_power_of_2(int(case["M"])), TILE_COLUMNS[0]), TILE_COLUMNS[-1])


def footprint(config: SwapAbConfig, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources.  Shared memory holds the ring buffer; the partial sums later use the same memory."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    cta_k = cdiv(cdiv(K, config.block_k), config.split) * config.block_k
    tile = (config.block_m + config.block_n) * config.block_k
    return Footprint(
        threads=LOAD_THREADS + 2 * config.block_n,
        registers=config.block_m // 2 + 24,
        shared_bytes=config.num_stages * tile * scheme.activation.itemsize,
        ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n) * config.split,
        tensor_flops=2.0 * config.block_m * config.block_n * cta_k,
    )


def rule(config: SwapAbConfig, case: Case, scheme: Scheme = BF16) -> bool:
    """Tells whether a config is legal.

    The number of rows of `a` in a tile must be M, rounded up to a power of two from 8 to 64.  A row of the tile has 128
    or 256 bytes.  Each part of a split K must have at least `block_k` values.  The partial sums must fit into shared
    memory, in place of the operands."""
    resources, row_pieces = footprint(config, case, scheme), config.block_k * scheme.activation.itemsize / SWIZZLE_BYTES
    sums_fit = config.block_m * (config.block_n + 4) * 4 <= resources.shared_bytes
    shares_fit = config.split == 1 or config.split * config.block_k <= int(case["K"])
    return config.block_m == columns(case) and row_pieces in (1, 2) and sums_fit and shares_fit


def one_wave_of_two(case: Case, scheme: Scheme = BF16) -> SwapAbConfig:
    """Returns the default config.

    A tile has 128 rows of the weight if `a` has many rows, or if every SM still gets a tile.  Otherwise it has 64.  K
    is split into at most 8 parts, until 90% of the SMs have a CTA.  An SM has space for two CTAs.  The second costs no
    time, because both share the memory bandwidth."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    block_m, swizzle_k = columns(case), SWIZZLE_BYTES // scheme.activation.itemsize
    block_n = 128 if block_m > 16 or N >= 128 * HOPPER_SMS else 64
    block_k = 2 * swizzle_k if block_m + block_n <= 96 else swizzle_k  # two pieces of a row, if four stages still fit
    k_split = 1
    while cdiv(M, block_m) * cdiv(N, block_n) * k_split < LEAST_CTAS and k_split < 8 and 8 * k_split * block_k <= K:
        k_split *= 2
    stage_bytes = (block_m + block_n) * block_k * scheme.activation.itemsize
    return SwapAbConfig(block_m, block_n, block_k, min(RING_BYTES // stage_bytes, 8), k_split)


TUNING = Tuning(
    SwapAbConfig,
    space(
        SwapAbConfig,
        (TILE_COLUMNS, (64, 128, 256), (SWIZZLE_BYTES, 2 * SWIZZLE_BYTES)),
        in_bytes=True,
        num_stages=(3, 4, 5, 6, 8, 12),
        split=(1, 2, 4, 8),
    ),
    one_wave_of_two,
    footprint,
    rule,
)


def divided(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: compiler options, grid, scalars, shared memory."""
    a, b, config = of.a, of.b, of.config
    (K, N), M, item_bytes = b.shape, a.shape[0], a.element_size()
    compiler_options = _cuda.macros(
        ELEMENT=_cuda.ELEMENT_CODES[a.dtype],
        BLOCK_M=config.block_m,
        WARPGROUPS=config.block_n // 64,
        PIECES=config.block_k * item_bytes // SWIZZLE_BYTES,
        STAGES=config.num_stages,
        SPLIT=config.split,
    )
    share_steps = cdiv(cdiv(K, config.block_k), config.split)
    return (
        compiler_options,
        (cdiv(N, config.block_n) * config.split, cdiv(M, config.block_m)),
        (LOAD_THREADS + 2 * config.block_n,),
        (*map(np.int32, (M, N, K, share_steps)), *map(np.int64, _operands.row_strides(of))),
        config.num_stages * (config.block_m + config.block_n) * config.block_k * item_bytes,
    )


@kernel(
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("cupy",),
    holds={"precision == 'tf32' or itemsize < 4": "tf32, to which wgmma rounds fp32", **_operands.along_k("a", "b")},
    whole={"a": 1, "b": 0},
    bind=divided,
    traffic=lambda inputs: _operands.panels_traffic(inputs, inputs.config.block_m),
    tuning=TUNING,
    over="split_k",
    shows={
        "M={1|8|16|32|64},N=4096,K=4096,layout=NT,bias=false": (
            'opcode(f"HGMMA_64x{max(M, 8)}x16") == HGMMA > 0; '
            "launched == 1 and stack_bytes == 0 and ctas >= 124 and UCGABAR_ARV > 0"
        ),
        "M=16,N=4096,K=4096,layout=NT,bias=false": (
            'rung("split_k").mma > rung("split_k").wgmma == 0 and any(loop.cp_async for loop in loops); '
            "all(loop.cp_async == loop.global_load == 0 for loop in loops if loop.wgmma)"
        ),
    },
)
def swap_ab(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: SwapAbConfig,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` by wgmma, in fp32.  Reads the whole weight once for every 64 rows of `a`."""
    compiler_options, grid, cta_threads, scalar_args, shared_bytes = bound
    compiled_kernel = _cuda.load(SOURCE, "swap_ab", options=compiler_options, dependent=pdl_is_on())
    compiled_kernel(grid, cta_threads, a, b, bias, residual, c, *scalar_args, shared_bytes=shared_bytes)
