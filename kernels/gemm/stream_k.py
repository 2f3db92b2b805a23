"""Implements the kernel `stream_k`.  Each SM gets the same number of steps along K.

The kernel improves on `split_k`, where the number of CTAs rarely fits the SMs.  The steps of all tiles form one
sequence, which is cut into equal parts (Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense
Matrix-Matrix Multiplication on the GPU", 2023).  If several CTAs compute one tile, a second launch adds their fp32 sums
in a fixed order.  So two runs agree bit for bit.

The paper uses flags instead.  These would have to be zero before every launch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import constants, panels_traffic, row_stride
from rooflab.kernels.gemm._tiles import StreamTile, by_fma, few_rows, few_space
from rooflab.kernels.gemm._tiles import by_pointers as tile_needs
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme
from rooflab.roofline.model import Traffic


def tile_steps(K: int, config: StreamTile) -> int:
    """Returns the number of steps along K per tile.  If K is 0, returns 1: a step that adds nothing."""
    return max(cdiv(K, config.block_k), 1)


def streamed(config: StreamTile, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns the resources of stream_k's first launch, in which each CTA computes an equal part of all steps.

    With tensor cores, the store of a tile needs additional shared memory (read in the compiled kernels, and checked by
    tests/ops/test_gemm_ladder.py)."""
    cta_resources, output_count = tile_needs(config, case, scheme), config.block_m * config.block_n
    steps = cta_resources.ctas * tile_steps(int(case["K"]), config)
    ctas = max(min(HOPPER_SMS, steps), 1)
    extra_bytes = 0 if by_fma(scheme) else 4 * output_count
    flops = 2.0 * output_count * config.block_k * steps / ctas
    return replace(cta_resources, shared_bytes=cta_resources.shared_bytes + extra_bytes, ctas=ctas, tensor_flops=flops)


TUNING = Tuning(
    StreamTile, few_space(StreamTile, num_stages=(3, 4, 5, 6, 8, 12)), few_rows(StreamTile, 128, (7, 6, 8), 8), streamed
)
"""The tuning for one CTA per SM, which has all of the SM's memory.  The number of tiles need not fit the SMs, so tiles
are wide: the loop then computes the position of fewer tiles."""


@triton.jit
def _gemm(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = max(tl.cdiv(K, BLOCK_K), 1)
    # int64, because step * programs passes 2**31, and so do offsets.
    total_steps = tl.cast(tl.cdiv(M, BLOCK_M), tl.int64) * tiles_n * steps
    program_id = tl.program_id(0).to(tl.int64)
    first_step = (program_id * total_steps // tl.num_programs(0)).to(tl.int32)
    end_step = ((program_id + 1) * total_steps // tl.num_programs(0)).to(tl.int32)
    k_offsets = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for global_step in range(first_step, end_step):
        tile = global_step // steps
        k = global_step % steps * BLOCK_K
        rows = (tile // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        k_indices = k.to(tl.int64) + k_offsets
        a_ptrs = a_ptr + rows[:, None] * stride_am + k_indices[None, :] * stride_ak
        b_ptrs = b_ptr + k_indices[:, None] * stride_bk + columns[None, :] * stride_bn
        a = tl.load(a_ptrs, mask=(rows < M)[:, None] & (k_offsets < K - k)[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(k_offsets < K - k)[:, None] & (columns < N)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        is_last_step = global_step % steps == steps - 1
        if is_last_step or global_step == end_step - 1:
            # A tile is whole if its first step is in this share.
            if is_last_step and global_step - (steps - 1) >= first_step:
                if HAS_BIAS:
                    accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
                out_mask = (rows < M)[:, None] & (columns < N)[None, :]
                if HAS_RESIDUAL:
                    residual = tl.load(
                        residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0
                    )
                    accumulator += residual.to(tl.float32)
                out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
                tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)
            else:
                # Each program has two places: for a tile that another program began, and for the tile that it begins.
                partial_index = 2 * program_id + (global_step - global_step % steps >= first_step).to(tl.int64)
                tile_offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tl.store(partial_ptr + partial_index * (BLOCK_M * BLOCK_N) + tile_offsets, accumulator)
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@triton.jit
def _fix_up(
    bias_ptr, residual_ptr, out_ptr, partial_ptr, M, N, K, programs, stride_rm, stride_om,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = max(tl.cdiv(K, BLOCK_K), 1)
    total_steps = tl.cast(tl.cdiv(M, BLOCK_M), tl.int64) * tiles_n * steps
    tile = tl.program_id(0)
    # A step belongs to the last share that begins at or before it.
    first_program = ((tile.to(tl.int64) * steps + 1) * programs - 1) // total_steps
    last_program = ((tile.to(tl.int64) * steps + steps) * programs - 1) // total_steps
    if first_program == last_program:
        return
    tile_rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile_offsets = tile_rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    accumulator = tl.load(partial_ptr + (2 * first_program + 1) * (BLOCK_M * BLOCK_N) + tile_offsets)
    for program in range(first_program + 1, last_program + 1):
        accumulator += tl.load(partial_ptr + 2 * program * (BLOCK_M * BLOCK_N) + tile_offsets)
    rows = (tile // tiles_n).to(tl.int64) * BLOCK_M + tile_rows
    columns = (tile % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows < M)[:, None] & (columns < N)[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0)
        accumulator += residual.to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of `b` once per row of tiles.  If CTAs share tiles, adds two fp32 partial tiles per SM."""
    a, config = inputs.a, inputs.config
    mm_traffic = panels_traffic(inputs, config.block_m)
    _, program_count, is_split = _shares(a.shape[0], a.shape[1], inputs.b.shape[1], config, a.device)
    sum_bytes = 2 * program_count * config.block_m * config.block_n * 4 if is_split else 0
    return Traffic(mm_traffic.read_bytes + sum_bytes, mm_traffic.write_bytes + sum_bytes, launches=2 if is_split else 1)


def _shares(M: int, K: int, N: int, config: StreamTile, device: torch.device) -> tuple[int, int, bool]:
    """Returns the number of tiles, the number of programs, and True if several programs share a tile.  Shared tiles
    need a second launch."""
    tiles = int(cdiv(M, config.block_m) * cdiv(N, config.block_n))
    steps = tile_steps(K, config)
    program_count = min(sm_count(device), tiles * steps)
    return tiles, program_count, steps > 1 and tiles % program_count > 0


def by_pointers(of: Arguments) -> Any:
    """Computes launch arguments from shapes, strides and options.  Adds a second launch if programs share a tile."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    tiles, ctas, has_shared_tiles = _shares(M, K, N, config, of.a.device)
    stride_rm, stride_om = row_stride(of.residual), of.c.stride(0)
    scalar_args = (M, N, K, *of.a.stride(), *of.b.stride(), stride_rm, stride_om)
    rows = min(config.block_m, 16)
    addend_flags = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    tile_sizes = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "ROWS": rows}
    # For K = 1 no tile is cut; Triton 3.6 could not compile the second launch for it.
    fix_up_args = (tiles, config.block_m // rows), (M, N, K, ctas, stride_rm, stride_om), {**addend_flags, **tile_sizes}
    return ctas, scalar_args, constants(of), fix_up_args if has_shared_tiles else None


@kernel(
    backend="triton",
    traffic=traffic,
    bind=by_pointers,
    fenced_since="3.7.1",
    tuning=TUNING,
    over="split_k",
    shows={
        "M=16,N={4096|6144|28672},K=4096,layout=NT,bias=false": (
            'ctas == 132 and stack_bytes == 0 and rung("split_k").ctas % 132 != 0'
        )
    },
)
def stream_k(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    residual: Tensor | None,
    precision: str,
    config: StreamTile,
    bound: Any,
) -> None:
    """Computes `a @ b + bias + residual` in fp32.  Allocates two fp32 tiles per SM.  Two runs agree bit for bit."""
    ctas, scalar_args, constexpr_args, fix_up_args = bound
    partial_sums = torch.empty((2 * ctas, config.block_m, config.block_n), dtype=torch.float32, device=c.device)
    _gemm[(ctas,)](a, b, bias, residual, c, partial_sums, *scalar_args, **constexpr_args)
    if fix_up_args is not None:
        grid, scalar_args, constexpr_args = fix_up_args
        _fix_up[grid](bias, residual, c, partial_sums, *scalar_args, **constexpr_args)
