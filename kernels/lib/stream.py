"""Holds host code of the `gemv` kernels of gemm_w4a16 and gemm_w8a16: configs, and the launch of `stream.cu`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic
from rooflab.roofline.occupancy import MAX_REGISTERS_PER_THREAD

SOURCE = (_cuda.LIB_FOLDER / "stream.cu").read_text()
WARP_THREADS = 32
WARP_ROWS = 16
"""The number of weight rows per warp: the M of mma.m16n8k16."""
TILE_COLUMNS = 8
"""The number of columns of a tile: the N of mma.m16n8k16."""
MAX_COLUMNS = 16
"""The most columns: two mma per 16 x 16 codes.  With more, activations would take the registers of the stream."""
MAX_M = 8
VECTOR_BYTES = 16
"""Bytes of a load of `a`, if each row of `a` is a whole number of such loads."""
LANE_QUAD_BYTES = 64
"""Bytes of a weight row that a warp loads at once."""
OTHER_REGISTERS = 32
"""The least number of registers for addresses, scales and dequantized codes."""
BF16X2_128 = 0x43004300
"""A word that holds 128 in bf16 twice."""


@dataclass(frozen=True)
class Config:
    """Describes how the weight is divided among warps and CTAs."""

    warps: int
    """The number of warps of a CTA."""
    warps_k: int
    """The number of warps that share 16 rows.  Each warp takes every `warps_k * split`-th chunk of K."""
    split: int
    """The number of CTAs of a cluster that share 16 rows."""
    depth: int
    """The number of chunks that a warp loads ahead of the chunk that it multiplies."""


def chunks(K: int, bits: int) -> int:
    """Returns the number of 64-byte chunks in a row of codes."""
    return -(-K * bits // (8 * LANE_QUAD_BYTES))


def column_tiles(M: int, subgroups: int) -> int:
    """Returns the number of mma tiles, of eight columns each, for M rows of `a`.  64 bytes of weight codes have
    `subgroups` different scales.  Each scale needs its own sums, so a row of `a` takes `subgroups` columns."""
    return -(-M * subgroups // TILE_COLUMNS)


def warps_per_sm(tiles: int, zeros: bool) -> int:
    """Returns the number of warps that fit in an SM's registers.  A thread has 128 registers.  With a second tile of
    activations, or with zero points, it has 168.  If both are used, it has 255."""
    return {0: 16, 1: 12, 2: 8}[(tiles > 1) + zeros]


def tuning(bits: int, subgroups: Callable[[Scheme], int]) -> Tuning:
    """Returns the functions that tune a `gemv` kernel: they give the configs to try, the default config, and a config's
    resources and legality.

    The weight has codes of `bits` bits.  `subgroups` is a function of the dtypes.  It returns the number of scales that
    64 bytes of codes have."""

    def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
        """Returns all configs that split K over warps and over CTAs, with two to eight chunks in flight."""
        size_sets = itertools.product(((4, 1), (4, 2), *((n, n) for n in (3, 4, 5, 6, 8))), (1, 2, 4, 8), (2, 4, 6, 8))
        return tuple(Config(*warps, split, depth) for warps, split, depth in size_sets)

    def tiles_of(case: Case, scheme: Scheme) -> tuple[int, int]:
        """Returns two numbers: the rows of `a` in one call (up to the kernel's limit), and the mma tiles for these
        rows.  A tile has eight columns, and a row of `a` takes one or more columns."""
        M = min(int(case["M"]), MAX_M, MAX_COLUMNS // subgroups(scheme))
        return M, column_tiles(M, subgroups(scheme))

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        """Returns the least registers and shared memory of a CTA.  Registers hold the weight codes in flight, and the
        activations for two chunks.  A chunk is 64 bytes of codes of a weight row.  Shared memory holds the sums."""
        M, tiles = tiles_of(case, scheme)
        return Footprint(
            threads=WARP_THREADS * config.warps,
            registers=8 * config.depth + 2 * tiles * 64 // bits + 8 * tiles,
            shared_bytes=4 * WARP_ROWS * config.warps * M,
            ctas=cdiv(int(case["N"]), WARP_ROWS * (config.warps // config.warps_k)) * config.split,
        )

    def rule(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
        """Returns whether a config is legal.  If K is split, each part must have at least 64 bytes of codes of a weight
        row.  A thread's codes, activations and sums must fit in its registers."""
        k_shares, cta_resources = config.warps_k * config.split, footprint(config, case, scheme)
        has_enough_chunks = k_shares == 1 or k_shares <= chunks(int(case["K"]), bits)
        return has_enough_chunks and cta_resources.registers <= MAX_REGISTERS_PER_THREAD - OTHER_REGISTERS

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        """Returns the default config.  It splits K into more parts until the warps fill all SMs.  Each part has at
        least 64 bytes of codes of a weight row."""
        row_tiles, max_k_shares = max(cdiv(int(case["N"]), WARP_ROWS), 1), chunks(int(case["K"]), bits)
        warps = warps_per_sm(tiles_of(case, scheme)[1], bool(case.get("zeros")))
        depth = 6 if warps <= 8 else 4
        k_shares = max(min(HOPPER_SMS * warps // row_tiles, max_k_shares), 1)
        if k_shares <= 2:
            return Config(4, k_shares, 1, depth)
        split = next(split for split in (1, 2, 4, 8) if k_shares <= 8 * split or split == 8)
        cta_warps = min(k_shares // split, 8)
        return Config(cta_warps, cta_warps, split, depth)

    return Tuning(Config, configs, heuristic, footprint, rule)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of every operand once, because L1 and L2 keep `a`.  Partial sums stay in the cluster."""
    a, scale = inputs.a, inputs.scale
    read_bytes = nbytes(a, inputs.b, scale, getattr(inputs, "zero", None), inputs.bias)
    return Traffic(read_bytes, a.shape[0] * scale.shape[0] * a.element_size())


def divided(of: Arguments, bits: int, subgroups: int) -> Any:
    """Divides the work of a call.  Returns compiler options, the grid, the threads of a CTA, sizes and strides."""
    a, codes, scale, config, has_zero_points = of.a, of.b, of.scale, of.config, getattr(of, "zero", None) is not None
    (M, K), N = a.shape, codes.shape[0]
    tiles = column_tiles(M, subgroups)
    has_aligned_rows = (a.data_ptr() | 2 * K | (2 * a.stride(0) if M > 1 else 0)) % VECTOR_BYTES == 0
    compile_options = _cuda.macros(
        BITS=bits,
        A_VECTORS=has_aligned_rows,
        SCALE=_cuda.ELEMENT_CODES[scale.dtype],
        ZEROS=has_zero_points,
        M=M,
        SUB=subgroups,
        N_TILES=tiles,
        WARPS=config.warps,
        WARPS_K=config.warps_k,
        SPLIT=config.split,
        DEPTH=config.depth,
        CTAS_PER_SM=max(warps_per_sm(tiles, has_zero_points) // config.warps, 1),
    )
    strides = a.stride(0) if M > 1 else 0, 4 * codes.stride(0), scale.stride(0) if N > 1 else 0, of.c.stride(0)
    kernel_scalars = *map(np.int32, (N, K, scale.shape[-1])), *map(np.int64, strides), np.uint32(BF16X2_128)
    grid = (cdiv(N, WARP_ROWS * (config.warps // config.warps_k)) * config.split,)
    return compile_options, grid, (WARP_THREADS * config.warps,), kernel_scalars


def launch(
    bound: Any, a: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, c: Tensor
) -> None:
    """Launches the kernel.  `codes` is int32 (N, words).  `scale` and `zero` (one per group) have contiguous rows."""
    compile_options, grid, threads, kernel_scalars = bound
    _cuda.load(SOURCE, "gemv", options=compile_options)(grid, threads, a, codes, scale, zero, bias, c, *kernel_scalars)
