"""Implements the kernel `tma`.  TMA loads complete tiles, with columns of gate and of up in one box.

The kernel improves on `fused`.  The tensor map describes the `[2 * I, K]` weight as `[2, I, K]`.  gemm/tma.py describes
the gains and costs of TMA.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiles import grouped_tile
from rooflab.kernels.gemm_silu_and_mul._configs import TMA, Config
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
    tile_m, tile_i = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(I, BLOCK_I), GROUP_M)
    row, column = tile_m * BLOCK_M, tile_i * BLOCK_I
    accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_I), dtype=tl.float32)
    # At least one step (K = 0 does not come here): for a loop that may not run, Triton 3.6.0 zeroes the accumulators
    # next to the loop, and ptxas then waits for each wgmma (read in the compiled code).
    for k in range(0, max(K, 1), BLOCK_K):
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
    tuning=TMA,
    over="fused",
    shows={
        "M=2048,I=14336,K=4096,layout=NT": (
            "below.loop.tma == 0 and below.loop.cp_async >= 8; "
            "loop.tma == 2 and loop.cp_async == 0 and loop.wgmma == below.loop.wgmma > 0; "
            "loop.shared_load == loop.shared_store == stack_bytes == 0; global_store == 0"
        )
    },
)
def tma(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """Computes `silu(a @ gate) * (a @ up)`, in fp32, rounded once.  TMA loads the operands and stores the result."""
    a_map, b_map, out_map, size_args = bound
    grid = (cdiv(size_args[0], config.block_m) * cdiv(size_args[1], config.block_i),)
    _gemm[grid](a_map(a), b_map(b), out_map(out), *size_args, **config.launch_arguments)
