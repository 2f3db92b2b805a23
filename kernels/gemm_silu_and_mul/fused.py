"""Over library: one launch; gate and up meet in registers in fp32, and only their result is rounded and stored.

This saves the write and the read of the product's 2 I columns, and two launches.  Triton's software pipelining loads
the next tiles by cp.async during a product, as in gemm's pipelined.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._tiled import by_fma, grouped_tile, uses_wgmma
from rooflab.kernels.gemm_silu_and_mul._tiled import gated_footprint, silu_product, traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme


@dataclass(frozen=True)
class Config(LaunchConfig):
    """Tile sizes and launch options."""

    block_m: int
    block_i: int
    """Columns of gate, and as many of up."""
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    """Row panels of tiles that share their columns of B in L2."""


# A decode batch fits one tile of 16 rows, the least of mma.sync; then only the bytes in flight matter: 200 KB for two
# CTAs on an SM.
DECODE = Config(block_m=16, block_i=32, block_k=128, num_warps=4, num_stages=5)
FEW_ROWS = Config(block_m=32, block_i=32, block_k=128, num_warps=4, num_stages=5)
# 64 rows are the least of wgmma.
SMALL = Config(block_m=64, block_i=64, block_k=64, num_warps=4, num_stages=4)
LARGE = Config(block_m=128, block_i=128, block_k=64, num_warps=8, num_stages=4, group_m=16)
# Exact fp32 has no tensor core: FMAs hold both tiles in registers, and larger tiles spill.
FULL_PRECISION = Config(block_m=32, block_i=32, block_k=16, num_warps=4, num_stages=2)


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles up to what two warpgroups hold in registers, with pipelines of several depths."""
    if by_fma(scheme):
        sides = itertools.product((16, 32, 64), (16, 32, 64), (16, 32))
    else:
        sides = itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128), (32, 64, 128, 256))
    return tuple(
        Config(block_m, block_i, block_k, num_warps, num_stages, group_m)
        for block_m, block_i, block_k in sides
        for num_warps, num_stages, group_m in itertools.product((4, 8), (2, 3, 4, 5), (1, 8, 16))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Tiles of a and b for every allocated stage; mma.sync frees a stage at once (see gemm's pipelined)."""
    stages = config.num_stages if uses_wgmma(config.block_m, scheme) else config.num_stages - 1
    blocks = config.block_m, config.block_i, config.block_k
    return gated_footprint(blocks, config.num_warps, stages, case, scheme)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One of the configs above, by the rows of a; tiles of half the size if large ones leave SMs without a tile."""
    M, I = int(case["M"]), int(case["I"])
    if by_fma(scheme):
        return FULL_PRECISION
    config = LARGE if M * I >= HOPPER_SMS * LARGE.block_m * LARGE.block_i else SMALL
    if M <= 64:
        config = DECODE if M <= 16 else FEW_ROWS if M <= 32 else SMALL
        if I < HOPPER_SMS * config.block_i:
            config = replace(config, block_i=config.block_i // 2)
    return replace(config, block_k=config.block_k * 2 // scheme.activation.itemsize)


@triton.jit
def _gemm(
    a_ptr, b_ptr, out_ptr, M, I, K, stride_am, stride_ak, stride_bk, stride_bn, stride_om,
    BLOCK_M: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_i = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(I, BLOCK_I), GROUP_M)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pairs = tl.arange(0, 2 * BLOCK_I)
    columns = tile_i.to(tl.int64) * BLOCK_I + pairs % BLOCK_I
    both = columns + pairs // BLOCK_I * tl.cast(I, tl.int64)  # columns of gate, then the same of up
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner.to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + inner.to(tl.int64)[:, None] * stride_bk + both[None, :] * stride_bn
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    accumulator = tl.zeros((BLOCK_M, 2 * BLOCK_I), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (inner < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(inner < K - k)[:, None] & (columns < I)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += step_a
        b_ptrs += step_b
    out = silu_product(accumulator).to(out_ptr.dtype.element_ty)
    out_columns = tile_i.to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = (rows < M)[:, None] & (out_columns < I)[None, :]
    tl.store(out_ptr + rows[:, None] * stride_om + out_columns[None, :], out, mask=mask)


def by_pointers(of: Arguments) -> Any:
    """Of a layout: the grid, and sizes and strides."""
    (M, K), I, config = of.a.shape, of.out.shape[1], of.config
    grid = (cdiv(M, config.block_m) * cdiv(I, config.block_i),)
    return grid, (M, I, K, *of.a.stride(), *of.b.stride(), of.out.stride(0))


@kernel(
    backend="triton", traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint), bind=by_pointers,
    fenced_since="3.7",
)  # fmt: skip
def fused(a: Tensor, b: Tensor, out: Tensor, *, config: Config, bound: Any) -> None:
    """silu(a gate) * (a up), summed on the tensor cores in fp32 (fp32 on the FMA units) and rounded once."""
    grid, numbers = bound
    _gemm[grid](a, b, out, *numbers, **config.launch_arguments)
