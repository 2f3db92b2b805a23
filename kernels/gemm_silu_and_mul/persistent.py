"""Implements the kernel `persistent`.  One CTA per SM computes several tiles, and loads the next tile during a store.

The kernel improves on `tma`, where the tensor cores are idle during the first loads and the activation of each tile.  A
tile of 128 rows and 256 columns needs all registers of an SM, so no second CTA can fill this time.  Here one loop runs
over tiles and K (`flatten`), so loads continue across tiles.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import grouped_tile
from rooflab.kernels.gemm_silu_and_mul._configs import PERSISTENT, Config
from rooflab.kernels.gemm_silu_and_mul._maps import by_maps, traffic, why_no_maps
from rooflab.kernels.launcher import kernel


@triton.jit
def _silu_product(tile):
    """Returns `silu(gate) * up` in fp32.  The tile holds `gate` in its left half and `up` in its right half. A thread
    holds both values of a position."""
    rows: tl.constexpr = tile.shape[0]
    half_columns: tl.constexpr = tile.shape[1] // 2
    gate, up = tl.split(tl.permute(tl.reshape(tile, (rows, 2, half_columns)), (0, 2, 1)))
    exp_minus_abs = tl.exp(-tl.abs(gate))  # exp(-|gate|) cannot overflow
    return tl.where(gate >= 0.0, gate, gate * exp_minus_abs) / (1.0 + exp_minus_abs) * up


@triton.jit
def _gemm(
    a_map,
    b_map,
    out_map,
    M,
    I,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m, tiles_i = tl.cdiv(M, BLOCK_M), tl.cdiv(I, BLOCK_I)
    steps = tl.cdiv(K, BLOCK_K)
    tl.assume(steps > 0)  # the compiler fuses the loops only if the inner loop always runs
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_i, tl.num_programs(0), flatten=True):
        tile_m, tile_i = grouped_tile(tile, tiles_m, tiles_i, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_i * BLOCK_I
        accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_I), dtype=tl.float32)
        for k_step in range(steps):
            k = k_step * BLOCK_K
            a = a_map.load([row, k])
            b = b_map.load([0, column, k]).reshape(2 * BLOCK_I, BLOCK_K).T
            accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        out_map.store([row, column], _silu_product(accumulator).to(out_map.dtype))


@kernel(
    backend="triton",
    min_sm=90,
    unsupported=why_no_maps,
    aligned=("a", "b"),
    bind=by_maps,
    empty=lambda of: of.out.zero_(),
    traffic=traffic,
    tuning=PERSISTENT,
    over="tma",
    shows={
        "M=2048,I=14336,K=4096,layout=NT": (
            "below.grid[0] > 132 == grid[0] and stack_bytes == 0; "
            "len([loop for loop in loops if not loop.waits]) == 1; loop.wgmma > 0 and loop.tma == below.loop.tma + 1"
        )
    },
)
def persistent(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """Computes `silu(a @ gate) * (a @ up)`, in fp32, rounded once.  TMA loads the operands and stores the result."""
    a_map, b_map, out_map, size_args = bound
    tiles = cdiv(size_args[0], config.block_m) * cdiv(size_args[1], config.block_i)
    grid = (min(tiles, sm_count(a.device)),)
    _gemm[grid](a_map(a), b_map(b), out_map(out), *size_args, **config.launch_arguments)
