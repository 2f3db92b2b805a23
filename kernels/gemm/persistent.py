"""Implements the kernel `persistent`.  One CTA per SM computes several tiles, and loads the next tile during a store.

The kernel improves on `tma`, where each tile must fill the pipeline again.  Here one loop runs over tiles and K
(`flatten`), so loads continue across tiles.  TMA stores a tile in parts (`store_parts`), which leaves more shared
memory for the pipeline.  If most SMs have no tile, use `split_k` or `stream_k`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm import _operands
from rooflab.kernels.gemm._tiles import Config, at_both_widths, by_tma, grouped_tile, one_wave, outputs, tma_space
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme

LEAST_STORE_COLUMNS = 64
"""The least columns of a part, if a tile is stored in several parts: 128 bytes per row in 16 bits."""
MAX_EXCHANGE_SIZE = 128 * 128
"""The most values that Triton exchanges at once (read in the kernels; tests/ops/test_gemm_ladder.py compares)."""
WARP_ROWS = 16
"""The number of rows of one warp, of the 64 rows of a wgmma."""


@dataclass(frozen=True)
class TileInParts(Config):
    """Holds a config: the tile sizes, and the number of parts of a result tile. TMA stores these parts one after
    another."""

    store_parts: int = 1
    """The number of parts of a tile's columns: 1, 2 or 4.  The parts are stored one after another."""


def footprint(config: TileInParts, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of a CTA.  An SM has at most one CTA.

    Shared memory holds tiles of `a` and `b`, a barrier per stage, and a part of the result.  Threads also exchange
    values through it: for a residual, and for a row that several warps share."""
    tile_bytes = config.block_m * config.block_n * scheme.output.itemsize
    part_bytes = tile_bytes // config.store_parts
    exchanged_bytes = min(part_bytes, MAX_EXCHANGE_SIZE * scheme.output.itemsize) if case.get("residual") else 0
    if config.store_parts > 1 and config.block_m < WARP_ROWS * config.num_warps:
        exchanged_bytes = max(exchanged_bytes, tile_bytes)
    return one_wave(by_tma(config, case, scheme), part_bytes + exchanged_bytes)


def _stored_in_parts(case: Case, scheme: Scheme = BF16) -> tuple[TileInParts, ...]:
    """Returns the configs to try.  Where an output tile is stored in parts, each part has at least
    `LEAST_STORE_COLUMNS` columns."""
    all_configs = tma_space(TileInParts, num_warps=(4, 8), store_parts=(1, 2, 4))(case, scheme)
    return tuple(c for c in all_configs if c.store_parts == 1 or c.block_n // c.store_parts >= LEAST_STORE_COLUMNS)


def _tiles(*tile: int) -> tuple[TileInParts, ...]:
    """Returns three configs that differ in their number of pipeline stages. The first config has the values in `tile`.
    The second config has one stage less, and the third has two stages less. Fewer stages leave shared memory for a
    residual."""
    first_config = TileInParts(*tile)
    return tuple(replace(first_config, num_stages=first_config.num_stages - cut_stages) for cut_stages in range(3))


# As many stages as fit with a part of the result.
TUNING = Tuning(
    TileInParts,
    _stored_in_parts,
    Defaults(
        at_both_widths(
            ({"M": 256, "N": 4096}, _tiles(64, 32, 64, 4, 8, 32)),
            ({"M": 256, "N": 6144}, _tiles(64, 64, 64, 4, 8, 32)),
            ({"M": 256, "N": 32768}, _tiles(64, 256, 64, 4, 4, 32, 2)),
            ({"M": 256, "N": 65536}, _tiles(64, 128, 64, 4, 8, 32)),
            ({"M": 256}, _tiles(64, 256, 64, 4, 4, 32, 2)),
            ({"outputs": 524288}, _tiles(64, 64, 64, 4, 8, 32)),
            ({"outputs": 2097152}, _tiles(128, 128, 64, 8, 6, 16, 2)),
            ({}, _tiles(128, 256, 64, 8, 4, 16, 4)),
        ),
        outputs,
    ),
    footprint,
)


@triton.jit
def _halves(tile):
    """Splits the columns of a tile into a left and a right half.  Values stay in their threads, because a warp owns
    whole rows."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def _parts(tile, COUNT: tl.constexpr):
    """Splits the columns of a tile into `COUNT` equal parts (1, 2 or 4).  Returns them from left to right."""
    if COUNT == 1:
        return (tile,)
    elif COUNT == 2:  # no early return: Triton would compile the code after it for COUNT == 1 too
        return _halves(tile)
    else:
        left_half, right_half = _halves(tile)
        first_part, second_part = _halves(left_half)
        third_part, fourth_part = _halves(right_half)
        return first_part, second_part, third_part, fourth_part


@triton.jit
def _gemm(
    a_map, b_map, out_map, bias_ptr, residual_ptr, M, N, K, stride_rm,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STORE_PARTS: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)  # the compiler fuses the loops only if the inner loop always runs
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k_step in range(steps):
            k = k_step * BLOCK_K
            a = a_map.load([k, row]).T if A_TRANSPOSED else a_map.load([row, k])
            b = b_map.load([column, k]).T if B_TRANSPOSED else b_map.load([k, column])
            accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)  # int64, because row * stride passes 2**31
        tile_parts = _parts(accumulator, STORE_PARTS)
        # TMA does not store values past the edges.
        for part_index in tl.static_range(STORE_PARTS):
            first_column = column + part_index * (BLOCK_N // STORE_PARTS)
            columns = first_column + tl.arange(0, BLOCK_N // STORE_PARTS)
            tile_part = tile_parts[part_index]
            if HAS_BIAS:
                tile_part += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            if HAS_RESIDUAL:
                mask = (rows < M)[:, None] & (columns < N)[None, :]
                residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=mask, other=0.0)
                tile_part += residual.to(tl.float32)
            out_map.store([row, first_column], tile_part.to(out_map.dtype))


def by_maps(of: Arguments) -> Any:
    """Computes the arguments of a kernel launch: the grid, sizes, strides and constants.  Each of `a`, `b` and the
    output also gets a function that makes its TMA map."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    a, b = _operands.stored_operands(of.a, of.b)
    c = _operands.stored_output(of.c).map(config.block_m, config.block_n // config.store_parts)
    tensor_maps = a.map(config.block_m, config.block_k), b.map(config.block_k, config.block_n), c
    grid = (min(cdiv(M, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    scalar_args = M, N, K, _operands.row_stride(of.residual)
    return tensor_maps, grid, scalar_args, _operands.constants(of, a, b)


@kernel(
    backend="triton",
    min_sm=90,
    aligned=("a", "b"),
    empty=_operands.epilogue_alone,
    bind=by_maps,
    unsupported=partial(_operands.why_not_by_tma, stores=True),
    traffic=_operands.tiles_traffic,
    tuning=TUNING,
    over="tma",
    shows={
        "": (
            "below.grid[0] > 132 == grid[0] and stack_bytes == 0; "
            "len([loop for loop in loops if not loop.waits]) == 1; "
            "loop.wgmma > 0 and loop.tma == below.loop.tma + 4; global_store == 0"
        )
    },
)
def persistent(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: TileInParts,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` on tensor cores, in fp32.  TMA loads the operands and stores the result."""
    (a_map, b_map, c_map), grid, scalar_args, constexpr_args = bound
    _gemm[grid](a_map(a), b_map(b), c_map(c), bias, residual, *scalar_args, **constexpr_args)
