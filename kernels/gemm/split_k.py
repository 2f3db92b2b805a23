"""Over pipelined, for few rows of a: K is split over CTAs until one wave of CTAs fills the SMs.

With one row of tiles, a weight with N = 4096 has 64 tiles, and half of the SMs read nothing.  Here each CTA takes a
share of a tile's K and writes an fp32 partial sum; a second launch adds the shares in order, so two runs agree bit for
bit.  Atomic adds would not agree.  A counter that tells a CTA that it is the last would have to be zero before every
launch, on every stream and in every replay of a graph, which costs a launch or a persistent buffer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic, row_stride
from rooflab.kernels.gemm._skinny_tiles import REDUCE_COLUMNS, registers, shared_bytes, stages, store_tile, tile
from rooflab.kernels.gemm._tiled import constants
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Arguments
from rooflab.kernels.tuning import BF16, Footprint, LaunchConfig, Tuning
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

LEAST_CTAS = 3 * HOPPER_SMS // 4
"""With fewer CTAs too many SMs are idle; with this many the busy SMs use the bandwidth of the idle ones."""
LEAST_STEPS = 4
"""Tiles of K per share: with fewer, a CTA ends before its loads overlap."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """A tile, and the number of CTAs that share its K."""

    block_m: int
    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles near the heuristic's, with several splits and depths of the pipeline."""
    block_m, block_n, block_k = tile(int(case["M"]), scheme)
    sides = itertools.product((block_m,), (block_n // 2, block_n, 2 * block_n), (block_k // 2, block_k))
    return tuple(
        Config(*sizes, split, num_warps, num_stages)
        for sizes in sides
        for split, num_warps, num_stages in itertools.product((1, 2, 3, 4, 6, 8, 16), (4, 8), (3, 4, 5, 6, 8))
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Needs of the first launch, where each CTA takes a share of a tile's K."""
    sides = (config.block_m, config.block_n, config.block_k)
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    depth = _steps(K, config) * config.block_k
    return Footprint(
        threads=32 * config.num_warps,
        registers=registers(*sides, config.num_warps, scheme),
        shared_bytes=shared_bytes(*sides, config.num_stages, scheme),
        ctas=cdiv(M, config.block_m) * cdiv(N, config.block_n) * config.split,
        tensor_flops=2.0 * config.block_m * config.block_n * depth,
    )


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Whether a CTA fits and every share of K has a tile of K."""
    split = config.split == 1 or config.split * config.block_k <= int(case["K"])
    return split and footprint(config, case, scheme).fits


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """The least split that fills the SMs."""
    M, N, K = int(case["M"]), int(case["N"]), int(case["K"])
    sides = tile(M, scheme)
    tiles = cdiv(M, sides[0]) * cdiv(N, sides[1])
    split = 1
    while tiles * split < LEAST_CTAS and split < 16 and (split + 1) * LEAST_STEPS * sides[2] <= K:
        split += 1
    return Config(*sides, split, 4, stages(*sides, scheme))


def _steps(K: int, config: Config) -> int:
    """Tiles of K per share; the last share may have fewer."""
    return int(cdiv(cdiv(K, config.block_k), config.split))


@triton.jit
def _gemm(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, M, N, K, steps, stride_am, stride_ak, stride_bk,
    stride_bn, stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    share = tl.program_id(1)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    first = share * steps * BLOCK_K
    a_ptrs = a_ptr + rows[:, None] * stride_am + (first + inner).to(tl.int64)[None, :] * stride_ak
    b_ptrs = b_ptr + (first + inner).to(tl.int64)[:, None] * stride_bk + columns[None, :] * stride_bn
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, min(K, first + steps * BLOCK_K), BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (inner < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(inner < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += step_a
        b_ptrs += step_b
    if SPLIT == 1:
        store_tile(accumulator, rows, columns, bias_ptr, residual_ptr, out_ptr, M, N, stride_rm, stride_om,
                   HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
    else:
        places = partial_ptr + (share * M + rows)[:, None] * N + columns[None, :]
        tl.store(places, accumulator, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _reduce(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, M, N, stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for share in tl.static_range(SPLIT):
        total += tl.load(partial_ptr + (share * M + row) * N + columns, mask=columns < N, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * stride_rm + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_om + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)


def traffic(inputs: Arguments) -> Traffic:
    """b once per row of tiles; with a split an fp32 sum per output and share, written and read."""
    config, whole = inputs.config, panels_traffic(inputs, inputs.config.block_m)
    if config.split == 1:
        return whole
    partial = 4 * inputs.a.shape[0] * inputs.b.shape[1] * config.split
    return Traffic(whole.read_bytes + partial, whole.write_bytes + partial, launches=2)


def by_pointers(of: Arguments) -> Any:
    """Of a layout: the grids, sizes and strides, and constants of both launches."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    stride_rm, stride_om = row_stride(of.residual), of.c.stride(0)
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n), config.split)
    numbers = (M, N, K, _steps(K, config), *of.a.stride(), *of.b.stride(), stride_rm, stride_om)
    has = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    added = {**has, "SPLIT": config.split, "COLUMNS": REDUCE_COLUMNS, "num_warps": 4}
    # M first, because the second dimension of a grid is at most 65535.
    return grid, numbers, constants(of), (M, cdiv(N, REDUCE_COLUMNS)), (M, N, stride_rm, stride_om), added


@kernel(
    backend="triton", traffic=traffic, bind=by_pointers, fenced_since="3.7",
    tuning=Tuning(Config, configs, heuristic, footprint, is_legal=is_legal),
)  # fmt: skip
def split_k(
    a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor, *,
    residual: Tensor | None, precision: str, config: Config, bound: Any,
) -> None:  # fmt: skip
    """a b + bias + residual in fp32; a split allocates split * M * N fp32 sums; two runs agree bit for bit."""
    grid, numbers, constants, reduce_grid, reduce_numbers, reduce_constants = bound
    partial = torch.empty((config.split, *c.shape), dtype=torch.float32, device=c.device) if config.split > 1 else None
    _gemm[grid](a, b, bias, residual, c, partial, *numbers, **constants)
    if partial is not None:
        _reduce[reduce_grid](partial, bias, residual, c, *reduce_numbers, **reduce_constants)
