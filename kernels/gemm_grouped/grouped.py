"""Implements the kernel `grouped`: one launch for all experts.  A CTA finds its tile from the offsets.

The kernel improves on `naive`.  The host does not read the offsets.  It launches the maximum number of CTAs, and CTAs
without a tile exit at once.  vLLM's fused mixture-of-experts kernel does the same, but pads the rows.  The CTAs of an
expert follow one another, so the expert's matrix is read from HBM once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.gemm._tiles import Config, grouped_tile
from rooflab.kernels.gemm_grouped._configs import GROUPED, panels
from rooflab.kernels.gemm_grouped._operands import traffic
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments


@triton.jit
def _tile_of(offsets_ptr, E, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Returns the output tile of this program: its expert, its first row, its column in tiles, and the expert's end row
    (the row after its last row). An end row at or below the first row means that the program has no tile."""
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
    a_ptr, b_ptr, offsets_ptr, out_ptr, E, N, K, stride_at, stride_ak, stride_be, stride_bk, stride_bn, stride_ot,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    expert, row, tile_n, expert_end = _tile_of(offsets_ptr, E, tl.cdiv(N, BLOCK_N), BLOCK_M, GROUP_M, BLOCK_E)
    if row >= expert_end:
        return
    # int64, because row * stride passes 2**31 from T * K = 2**31 on, and expert * stride sooner.
    rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_at + k_offsets.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + expert.to(tl.int64) * stride_be
    b_ptrs += k_offsets.to(tl.int64)[:, None] * stride_bk + columns[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < expert_end)[:, None] & (k_offsets < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k_offsets < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    out_mask = (rows < expert_end)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_ot + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


def by_pointers(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: the grid, scalars and constants."""
    T, (E, K, N), config = of.a.shape[0], of.b.shape, of.config
    grid = (panels(T, E, config.block_m) * cdiv(N, config.block_n),)
    scalar_args = (E, N, K, *of.a.stride(), *of.b.stride(), of.out.stride(0))
    return grid, scalar_args, {"BLOCK_E": next_power_of_2(E), **config.launch_arguments}


@kernel(
    backend="triton",
    traffic=traffic,
    tuning=GROUPED,
    bind=by_pointers,
    fenced_since="3.7.1",
    over="naive",
    shows={
        "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0": (
            "grid[0] == (4096 // 128 + 8) * (28672 // 256) and stack_bytes == 0; "
            "loop.wgmma == 4 and loop.cp_async > loop.global_load == loop.global_store == 0"
        ),
        "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0 in fp32": "not uses_tf32",
        "": 'calls("naive").names["mm"] == 6',
    },
)
def grouped(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """Multiplies each expert's rows by its matrix, on tensor cores or by FMAs.  The host does not read the offsets."""
    grid, scalar_args, constexpr_args = bound
    _gemm[grid](a, b, offsets, out, *scalar_args, **constexpr_args)
