"""Implements the kernels `tensor_core` and `pipelined`.  The tensor cores multiply tiles of `block_k` values along K.

`tensor_core` improves on `naive`.  Consecutive CTAs compute neighbouring tiles, so the rows of A stay in L2 (as in
Triton's matmul tutorial).  Loads and products do not overlap (read in the SASS).

`pipelined` is the same code with two or more stages.  Triton loads the next tiles by cp.async during a product.  In 16
bits it uses plain loads if rows are not contiguous, or if a stride or K is not a multiple of 16.

The PTX ISA requires a fence between cp.async and a wgmma that reads its data.  Triton 3.7 adds this fence, but Triton
3.6 does not (read in the PTX; the emulator reports a race).  This affects tiles of 64 rows or more.  The kernel option
`fenced_since` names the first version of Triton with the fence.  An engine with an older Triton does not use the
kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import constants, row_stride, tiles_traffic
from rooflab.kernels.gemm._tiles import PIPELINED, TENSOR_CORE, Config, grouped_tile
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments


@triton.jit
def _gemm(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_rm,
    stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + k_offsets.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + k_offsets.to(tl.int64)[:, None] * stride_bk + columns[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Triton places the waits.  One stage: all warps have stored their parts of the tiles, and wgmma sees them, before
    # the product; the product is done before the tiles are overwritten.  More stages: a tile's copies have arrived
    # before its product, and the product before it has read its slot before that is filled again.
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (k_offsets < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k_offsets < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        # Triton's default would round fp32 operands to TF32.
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows < M)[:, None] & (columns < N)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0)
        accumulator += residual.to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


def by_pointers(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options: the grid, sizes, strides and constants."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    return grid, (M, N, K, *of.a.stride(), *of.b.stride(), row_stride(of.residual), of.c.stride(0)), constants(of)


@kernel(
    backend="triton",
    traffic=tiles_traffic,
    tuning=TENSOR_CORE,
    bind=by_pointers,
    over="naive",
    shows={
        "": (
            "below.loop.fma > 0 and below.loop.wgmma == below.loop.mma == 0; loop.wgmma > 0 and loop.fma == 0; "
            "loop.global_load > 0 and loop.shared_store > 0 and loop.cp_async == 0"
        ),
        "in fp32": (
            "not uses_tensor_cores and not uses_tf32; "
            "loop.fma / loop.global_loads >= 10 * below.loop.fma / below.loop.global_loads"
        ),
    },
)
def tensor_core(
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
    """Computes `c = a @ b + bias + residual`.  Tensor cores multiply 16-bit operands, and fp32 operands if `precision`
    is `tf32`.  Other fp32 operands are multiplied by FMAs."""
    grid, scalar_args, kernel_constants = bound
    _gemm[grid](a, b, bias, residual, c, *scalar_args, **kernel_constants)


@kernel(
    backend="triton",
    traffic=tiles_traffic,
    tuning=PIPELINED,
    bind=by_pointers,
    fenced_since="3.7.1",
    over="tensor_core",
    shows={
        "": (
            "loop.wgmma == below.loop.wgmma and loop.cp_async == below.loop.global_load; "
            "loop.global_load == loop.shared_store == 0 and shared_bytes >= 3 * below.shared_bytes"
        )
    },
)
def pipelined(
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
    """Computes the same result as `tensor_core`, and loads the next tiles during a product."""
    grid, scalar_args, kernel_constants = bound
    _gemm[grid](a, b, bias, residual, c, *scalar_args, **kernel_constants)
