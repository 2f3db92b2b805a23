"""Implements the kernel `tma`.  The tensor memory accelerator (TMA) loads complete tiles by tensor maps.

The kernel improves on `pipelined`.  One thread issues the load of a tile, and a barrier counts its bytes.  With
cp.async, every thread needs an address, a mask and an instruction for each 16 bytes.  TMA writes zeros past the edges
of a matrix.  A map costs the host a driver call per launch.  Addresses and row strides must be multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm import _operands
from rooflab.kernels.gemm._tiles import TMA, Config, grouped_tile
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments


@triton.jit
def _gemm(
    a_map, b_map, bias_ptr, residual_ptr, out_ptr, M, N, K, stride_rm, stride_om,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # At least one step (K = 0 does not come here): for a loop that may not run, Triton 3.6 zeroes the accumulators next
    # to the loop, and ptxas then waits for each wgmma (C7515).
    for k in range(0, max(K, 1), BLOCK_K):
        a = a_map.load([k, row]).T if A_TRANSPOSED else a_map.load([row, k])
        b = b_map.load([column, k]).T if B_TRANSPOSED else b_map.load([k, column])
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    # int64, because row * stride passes 2**31 from M * N = 2**31 on; the maps use 64 bits anyway.
    rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows < M)[:, None] & (columns < N)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0)
        accumulator += residual.to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


def by_maps(of: Arguments) -> Any:
    """Computes the arguments of a kernel launch: the grid, sizes, strides and constants.  Each of `a` and `b` also gets
    a function that makes its TMA map."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    a, b = _operands.stored_operands(of.a, of.b)
    tensor_maps = a.map(config.block_m, config.block_k), b.map(config.block_k, config.block_n)
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    scalar_args = M, N, K, _operands.row_stride(of.residual), of.c.stride(0)
    return *tensor_maps, grid, scalar_args, _operands.constants(of, a, b)


@kernel(
    backend="triton",
    min_sm=90,
    unsupported=_operands.why_not_by_tma,
    aligned=("a", "b"),
    empty=_operands.epilogue_alone,
    bind=by_maps,
    traffic=_operands.tiles_traffic,
    tuning=TMA,
    over="pipelined",
    shows={
        "": (
            "below.loop.tma == 0 and below.loop.cp_async >= 8; "
            "loop.tma == 2 and loop.cp_async == 0 and loop.wgmma == below.loop.wgmma > 0; "
            "loop.shared_load == loop.shared_store == stack_bytes == 0"
        )
    },
)
def tma(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: Config,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` on the tensor cores, accumulated in fp32.  TMA loads the operands."""
    a_map, b_map, grid, scalar_args, constexpr_args = bound
    _gemm[grid](a_map(a), b_map(b), bias, residual, c, *scalar_args, **constexpr_args)
