"""What the tiled Triton kernels of gemm share: tile order, epilogue, and the kernel that reads through pointers."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic, row_stride
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import Footprint
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers, masks and the loop counter, in addition to the accumulators."""
WGMMA_ROWS = 64
"""Rows of a wgmma product; in smaller tiles warps multiply 16 rows by mma.sync."""


def by_fma(scheme: Scheme) -> bool:
    """Whether threads multiply by FMAs: the tensor cores have no exact fp32."""
    return scheme.activation == torch.float32 and scheme.name != "tf32"


def uses_wgmma(block_m: int, scheme: Scheme) -> bool:
    """Whether warpgroups multiply (wgmma)."""
    return block_m >= WGMMA_ROWS and not by_fma(scheme)


def tile_footprint(
    blocks: tuple[int, int, int],
    num_warps: int,
    staged_tiles: int,
    case: Case,
    scheme: Scheme,
    *,
    more_shared_bytes: int = 0,
) -> Footprint:
    """Needs of a tile: fp32 accumulators, without tensor cores both tiles in registers, and `staged_tiles` of a and b.

    `blocks`: M, N and K of a tile.
    """
    block_m, block_n, block_k = blocks
    threads = 32 * num_warps
    outputs = block_m * block_n
    tiles = (block_m + block_n) * block_k
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    return Footprint(
        threads=threads,
        registers=cdiv(outputs + (tiles if by_fma(scheme) else 0), threads) + ADDRESS_REGISTERS,
        shared_bytes=staged_tiles * tiles * scheme.activation.itemsize + more_shared_bytes,
        ctas=cdiv(M, block_m) * cdiv(N, block_n),
        tensor_flops=2.0 * outputs * cdiv(K, block_k) * block_k,
    )


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels, without reuse from L2."""
    return panels_traffic(inputs, inputs.config.block_m * inputs.config.group_m)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the `tile`-th tile: columns are the outer order within a group of GROUP_M row panels."""
    group_tiles = GROUP_M * tiles_n
    first_m = tile // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    return first_m + tile % group_tiles % group_m, tile % group_tiles // group_m


@triton.jit
def add_bias_and_residual(
    accumulator, bias_ptr, residual_ptr, stride_rm, rows, columns, M, N,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """accumulator + bias + residual in fp32; `rows` are int64."""
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=mask, other=0.0)
        accumulator += residual.to(tl.float32)
    return accumulator


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
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + inner.to(tl.int64)[:, None] * stride_bk + columns[None, :] * stride_bn
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (inner < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(inner < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        # Triton's default would round fp32 operands to TF32.
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += step_a
        b_ptrs += step_b
    accumulator = add_bias_and_residual(
        accumulator, bias_ptr, residual_ptr, stride_rm, rows, columns, M, N, HAS_BIAS, HAS_RESIDUAL
    )
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=mask)


def constants(of: Arguments) -> dict[str, Any]:
    """What a launch compiles into the device code."""
    has = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    return {**has, "PRECISION": of.precision, **of.config.launch_arguments}


def by_pointers(of: Arguments) -> Any:
    """Of a layout of `_gemm`: the grid, sizes and strides, and constants."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    return grid, (M, N, K, *of.a.stride(), *of.b.stride(), row_stride(of.residual), of.c.stride(0)), constants(of)
