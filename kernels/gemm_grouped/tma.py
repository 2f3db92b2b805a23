"""Implements the kernel `tma`.  TMA loads complete tiles, by a map of A and a three-dimensional map of B.

The kernel improves on `grouped`.  The last tile of an expert may contain rows of A that belong to the next expert.  The
results of these rows must not be stored.  TMA would store the whole tile, so threads store the results through pointers
with a mask.  gemm/tma.py describes the gains and costs of TMA.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._operands import stored_operands, why_not_by_tma
from rooflab.kernels.gemm._tiles import Config, grouped_tile
from rooflab.kernels.gemm_grouped._configs import TMA, panels
from rooflab.kernels.gemm_grouped._operands import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.tma import map_maker
from rooflab.reference.spec import Arguments


@triton.jit
def _tile_of(offsets_ptr, E, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns the position of this program's output tile: its expert, its first row, the column in tiles, and the end
    of the expert's rows. If the program has no tile, this end is not above the first row."""
    expert_ids = tl.arange(0, BLOCK_E)
    expert_starts = tl.load(offsets_ptr + expert_ids, mask=expert_ids < E, other=2**31 - 1)
    panel_id = tl.program_id(0) // tiles_n
    # The last expert whose panels begin at or before this one; others that begin here have no rows.
    expert = tl.sum((expert_starts // BLOCK_M + expert_ids <= panel_id).to(tl.int32)) - 1
    expert_start, expert_end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    tile = tl.program_id(0) - (expert_start // BLOCK_M + expert) * tiles_n
    tiles_m = tl.cdiv(expert_end - expert_start, BLOCK_M)
    if tile >= tiles_m * tiles_n:
        expert_end = expert_start
    tile_m, tile_n = grouped_tile(tile, max(tiles_m, 1), tiles_n, GROUP_M)
    return expert, expert_start + tile_m * BLOCK_M, tile_n, expert_end


@triton.jit
def _gemm(
    a_map,
    b_map,
    offsets_ptr,
    out_ptr,
    E,
    N,
    K,
    stride_ot,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert, row, tile_n, expert_end = _tile_of(offsets_ptr, E, tl.cdiv(N, BLOCK_N), BLOCK_M, GROUP_M, BLOCK_E)
    if row >= expert_end:
        return
    column = tile_n * BLOCK_N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # At least one step (K = 0 does not come here): for a loop that may not run, Triton 3.6.0 zeroes the accumulators
    # next to the loop, and ptxas then waits for each wgmma (read in the compiled code).
    for k in range(0, max(K, 1), BLOCK_K):
        a = a_map.load([row, k])
        b = b_map.load([expert, column, k]).reshape(BLOCK_N, BLOCK_K).T
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
    # int64, because row * stride passes 2**31 from T * N = 2**31 on; the maps use 64 bits anyway.
    rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    out_mask = (rows < expert_end)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_ot + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


def by_maps(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: functions for TMA maps, grid, scalars, constants."""
    T, (E, K, N), config = of.a.shape[0], of.b.shape, of.config
    a, expert = stored_operands(of.a, of.b)
    pitch = of.b.stride(0) if E > 1 else N * expert.stride  # the stride of a single expert has no meaning
    box = [1, config.block_n, config.block_k]
    maps = a.map(config.block_m, config.block_k), map_maker(TensorDescriptor, [E, N, K], [pitch, expert.stride, 1], box)
    grid = (panels(T, E, config.block_m) * cdiv(N, config.block_n),)
    return *maps, grid, (E, N, K, of.out.stride(0)), {"BLOCK_E": next_power_of_2(E), **config.launch_arguments}


@kernel(
    backend="triton",
    min_sm=90,
    unsupported=why_not_by_tma,
    aligned=("a", "b"),
    empty=lambda of: of.out.zero_(),
    bind=by_maps,
    traffic=traffic,
    tuning=TMA,
    over="grouped",
    shows={
        "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0": (
            "below.loop.tma == 0 and below.loop.cp_async >= 8; "
            "loop.tma == 2 and loop.cp_async == 0 and loop.wgmma == below.loop.wgmma > 0; "
            "loop.shared_load == loop.shared_store == stack_bytes == 0"
        )
    },
)
def tma(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """Multiplies each expert's rows by the expert's matrix, summed in fp32.  TMA loads the operands."""
    a_map, b_map, grid, scalar_args, constexpr_args = bound
    _gemm[grid](a_map(a), b_map(b), offsets, out, *scalar_args, **constexpr_args)
