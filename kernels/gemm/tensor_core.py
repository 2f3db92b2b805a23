"""Over naive: a tile of K at a time goes through the tensor cores.

Tiles are visited in groups of row panels, so that a group's columns of B are read while its panels of A are in L2
(the tile order of Triton's matmul tutorial).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import output
from rooflab.kernels.configs import BF16, Footprint, default_config, legal_by
from rooflab.kernels.gemm._operands import check_operands
from rooflab.kernels.registry import register
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of B."""


# A decode batch fits one 16-row tile, the least that mma.sync takes; then the pipeline of loads is all that matters.
DECODE = Config(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
# 64 rows are the least that wgmma takes.
SMALL = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3)
LARGE = Config(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
# fp32 without TF32 has no tensor core: FMAs hold both tiles in registers, and larger ones spill.
FULL_PRECISION = Config(block_m=32, block_n=64, block_k=16, num_warps=4, num_stages=2)
ADDRESS_REGISTERS = 24
"""Pointers, masks and the loop's counter, beside the accumulators."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles up to what two warpgroups hold in registers, with every depth of pipeline."""
    if scheme.activation == torch.float32:
        sides = itertools.product((16, 32, 64), (32, 64, 128), (16, 32))
    else:
        sides = itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128))
    return tuple(
        Config(block_m, block_n, block_k, num_warps, num_stages, group_m)
        for block_m, block_n, block_k in sides
        for num_warps, num_stages, group_m in itertools.product((4, 8), (2, 3, 4, 5), (1, 8))
    )


def uses_wgmma(config: Config, scheme: Scheme) -> bool:
    """Whether a product is a warpgroup's, of 64 rows or more; smaller ones and fp32 are a warp's or a thread's."""
    return config.block_m >= 64 and scheme.activation != torch.float32


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Accumulators in fp32 and, without tensor cores, both tiles beside them in registers; staged tiles of a and b.

    wgmma reads a stage while the others are filled; mma.sync has copied it to registers and gives it back at once, so
    that Triton allocates one stage fewer (read in the compiled kernels; tests/test_configs.py compares them).
    """
    threads = 32 * config.num_warps
    outputs = config.block_m * config.block_n
    tiles = (config.block_m + config.block_n) * config.block_k
    stages = config.num_stages if uses_wgmma(config, scheme) else config.num_stages - 1
    in_registers = outputs + (tiles if scheme.activation == torch.float32 else 0)
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    return Footprint(
        threads=threads,
        registers=triton.cdiv(in_registers, threads) + ADDRESS_REGISTERS,
        shared_bytes=stages * tiles * scheme.activation.itemsize,
        ctas=triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),
        tensor_flops=2.0 * outputs * triton.cdiv(K, config.block_k) * config.block_k,
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By the rows of a, as above."""
    M = int(case["M"])
    if scheme.activation == torch.float32:
        return FULL_PRECISION
    return DECODE if M <= 16 else SMALL if M <= 64 else LARGE


@triton.jit
def _gemm(
    a_ptr,
    b_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group_tiles = GROUP_M * tiles_n
    first_m = tl.program_id(0) // group_tiles * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tl.program_id(0) % group_tiles % group_m
    tile_n = tl.program_id(0) % group_tiles // group_m

    # int64: a row times its stride passes 2**31 from M K = 2**31 on.
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
        # ieee: without it fp32 operands are rounded to TF32.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += step_a
        b_ptrs += step_b
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=mask)


def traffic(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> Traffic:
    """a once; b again for every group of row panels, as if none of it were still in L2 by then."""
    M, N = a.shape[0], b.shape[1]
    config = config or default_config("gemm", "tensor_core", a.dtype, a.device, M=M, N=N, K=a.shape[1])
    return Traffic(
        read_bytes=nbytes(a, bias) + triton.cdiv(M, config.block_m * config.group_m) * nbytes(b),
        write_bytes=M * N * a.element_size(),
    )


@register(
    op="gemm",
    name="tensor_core",
    role="optimized",
    backend="triton",
    traffic=traffic,
    config_type=Config,
    configs=configs,
    is_legal=legal_by(footprint),
    heuristic=heuristic,
    footprint=footprint,
)
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """a b + bias on the tensor cores, accumulated in fp32; fp32 operands stay fp32 and take the FMA units.

    a: (M, K); b: (K, N); bias: (N,) contiguous; any strides of a and b; returns (M, N). Raises `ValueError` on shapes
    or dtypes that do not fit.
    """
    M, N, K = check_operands(a, b, bias)
    out = output(out, (M, N), a)
    config = config or default_config("gemm", "tensor_core", a.dtype, a.device, M=M, N=N, K=K)
    grid = (triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),)
    if out.numel():
        _gemm[grid](
            a,
            b,
            bias,
            out,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            out.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out
