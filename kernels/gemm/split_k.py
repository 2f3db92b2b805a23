"""Implements the kernel `split_k`, for few rows of `a`.  It splits K over several CTAs to fill the SMs.

The kernel improves on `pipelined`.  There a weight with N = 4096 has 64 tiles, and half of the SMs have no work.  Here
each CTA writes an fp32 partial sum.  A second launch adds these sums in a fixed order, so two runs agree bit for bit.

A counter of finished CTAs could replace the second launch.  But it would have to be zero before every launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import constants, panels_traffic, row_stride
from rooflab.kernels.gemm._tiles import StreamTile, few_rows, few_space
from rooflab.kernels.gemm._tiles import by_pointers as tile_needs
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme
from rooflab.roofline.model import Traffic

REDUCE_COLUMNS = 256
"""The number of outputs per CTA of the second launch."""
LEAST_CTAS = 3 * HOPPER_SMS // 4
"""The least number of CTAs.  With fewer, too many SMs are idle; from here on, busy SMs use the idle SMs' bandwidth."""
LEAST_STEPS = 4
"""The least tiles of K per share.  With fewer tiles, a CTA ends before its loads overlap."""


@dataclass(frozen=True)
class SplitTile(StreamTile):
    """A config: a tile, and the number of CTAs among which the K of a tile is split."""

    split: int = 1


def share_steps(K: int, config: SplitTile) -> int:
    """Returns the loop steps (of `block_k` values) for each part of a split K.  The last part may have fewer."""
    return cdiv(cdiv(K, config.block_k), config.split)


def shared_k(config: SplitTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of split_k's first launch, in which a tile's CTAs share its K: each computes a part."""
    needs = tile_needs(config, case, scheme)
    cta_k = share_steps(int(case["K"]), config) * config.block_k
    return replace(needs, ctas=needs.ctas * config.split, tensor_flops=2.0 * config.block_m * config.block_n * cta_k)


def is_shared_k(config: SplitTile, case: Case, scheme: Scheme = BF16) -> bool:
    """Returns whether the CTAs of an output tile can share its K as the config says.  One CTA must fit on an SM.  If
    the number of parts `split` is above 1, K must be at least `split * block_k`."""
    split_fits = config.split == 1 or config.split * config.block_k <= int(case["K"])
    return split_fits and shared_k(config, case, scheme).fits


TILES = few_rows(SplitTile, 64, (5, 5, 7), 3)


def least_split(case: Case, scheme: Scheme = BF16) -> SplitTile:
    """Returns the default config.  It splits K among the fewest CTAs that fill three quarters of the SMs.  Each CTA has
    at least `LEAST_STEPS` steps.  A CTA loads at most 64 KB of weights ahead, so two CTAs fit on an SM."""
    config: SplitTile = TILES(case, scheme, is_legal=lambda *_: True)
    tiles = tile_needs(config, case, scheme).ctas
    k_split, max_split = cdiv(LEAST_CTAS, max(tiles, 1)), int(case["K"]) // (LEAST_STEPS * config.block_k)
    return replace(config, split=max(min(k_split, max_split, 16), 1))


TUNING = Tuning(
    SplitTile,
    few_space(SplitTile, split=(1, 2, 3, 4, 6, 8, 16), num_stages=(3, 4, 5, 6, 8)),
    least_split,
    shared_k,
    is_shared_k,
)


@triton.jit
def _gemm(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, M, N, K, steps, stride_am, stride_ak, stride_bk,
    stride_bn, stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    share_id = tl.program_id(1)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    first_k = share_id * steps * BLOCK_K
    a_ptrs = a_ptr + rows[:, None] * stride_am + (first_k + k_offsets).to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + (first_k + k_offsets).to(tl.int64)[:, None] * stride_bk + columns[None, :] * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first_k, min(K, first_k + steps * BLOCK_K), BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (k_offsets < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k_offsets < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b_ptrs += tl.cast(stride_bk, tl.int64) * BLOCK_K
    if SPLIT == 1:
        if HAS_BIAS:
            accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        out_mask = (rows < M)[:, None] & (columns < N)[None, :]
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0)
            accumulator += residual.to(tl.float32)
        out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
        tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        partial_ptrs = partial_ptr + (share_id * M + rows)[:, None] * N + columns[None, :]
        tl.store(partial_ptrs, accumulator, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _reduce(
    partial_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    stride_rm,
    stride_om,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    output_sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for share_id in tl.static_range(SPLIT):
        output_sums += tl.load(partial_ptr + (share_id * M + row) * N + columns, mask=columns < N, other=0.0)
    if HAS_BIAS:
        output_sums += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        output_sums += tl.load(residual_ptr + row * stride_rm + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_om + columns, output_sums.to(out_ptr.dtype.element_ty), mask=columns < N)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of `b` once per row of tiles.  If K is split, adds the write and the read of partial sums."""
    config, mm_traffic = inputs.config, panels_traffic(inputs, inputs.config.block_m)
    if config.split == 1:
        return mm_traffic
    partial_bytes = 4 * inputs.a.shape[0] * inputs.b.shape[1] * config.split
    return Traffic(mm_traffic.read_bytes + partial_bytes, mm_traffic.write_bytes + partial_bytes, launches=2)


def by_pointers(of: Arguments) -> Any:
    """Computes the arguments of both launches from shapes, strides and options: grids, scalars and constants."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    stride_rm, stride_om = row_stride(of.residual), of.c.stride(0)
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n), config.split)
    gemm_args = (M, N, K, share_steps(K, config), *of.a.stride(), *of.b.stride(), stride_rm, stride_om)
    addend_flags = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    reduce_constants = {**addend_flags, "SPLIT": config.split, "COLUMNS": REDUCE_COLUMNS, "num_warps": 4}
    # M first, because the second dimension of a grid is at most 65535.
    return grid, gemm_args, constants(of), (M, cdiv(N, REDUCE_COLUMNS)), (M, N, stride_rm, stride_om), reduce_constants


@kernel(
    backend="triton",
    traffic=traffic,
    bind=by_pointers,
    fenced_since="3.7.1",
    tuning=TUNING,
    over="pipelined",
    shows={
        "M=16,N=4096,K=4096,layout=NT,bias=false": (
            "launched == 2 and below.ctas == grid[0] == 64 < 99 <= ctas and grid[1] > 1; "
            "loop.cp_async > 0 and loop.mma > 0 and atomic == stack_bytes == 0; "
            "second.global_load == grid[1] and second.atomic == 0"
        ),
        "M=16,N=28672,K=4096,layout=NT,bias=false": "launched == 1 and grid[1] == 1",
    },
)
def split_k(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: SplitTile,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` in fp32.  Runs agree bit for bit.  It stores `split * M * N` partial sums."""
    grid, scalar_args, constexpr_args, reduce_grid, reduce_scalars, reduce_constants = bound
    partials = torch.empty((config.split, *c.shape), dtype=torch.float32, device=c.device) if config.split > 1 else None
    _gemm[grid](a, b, bias, residual, c, partials, *scalar_args, **constexpr_args)
    if partials is not None:
        _reduce[reduce_grid](partials, bias, residual, c, *reduce_scalars, **reduce_constants)
