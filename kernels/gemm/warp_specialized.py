"""Implements the kernel `warp_specialized`.  One warpgroup only loads, and two warpgroups only multiply.

The kernel improves on `persistent`.  The producer warpgroup also loads during the epilogue.  Each consumer warpgroup
multiplies half of a tile's rows, and both share the tile of B.  While one consumer waits for its product, the other
uses the tensor cores.  No product runs while the consumers store.

Triton specializes warps (`warp_specialize`) only with `num_warps=4`.  It ignores the option with 8 warps (read in the
code of 3.6 and 3.7), so `rule` refuses 8.

Every CTA makes its tensor maps on the device.  Maps from the host do not work: Triton gives each consumer half of a
tile, but does not halve the map's box.  Triton 3.7 does not compile such a kernel.  Triton 3.6 copies 128 rows into
memory for 64 rows.
"""

from __future__ import annotations

import contextvars
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._device import sm_count
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm import _operands, _tiles
from rooflab.kernels.gemm._tiles import Config, at_both_widths, grouped_tile, one_wave, outputs, tma_space
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme

THREADS = 384
"""The threads of the two consumers and of the producer warp's warpgroup."""
SPECIALIZED_BARRIERS = 6
"""The barriers of a stage: full and empty, for both halves of `a` and for `b` (read in the compiled kernels)."""


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Returns a CTA's resources: accumulators in registers; tiles of `a`, `b` and the result in shared memory."""
    tile_values = config.block_m * config.block_n
    resources = _tiles.by_pointers(config, case, scheme, barriers=SPECIALIZED_BARRIERS)
    resources = replace(resources, threads=THREADS, registers=tile_values // (2 * 128) + _tiles.ADDRESS_REGISTERS)
    return one_wave(resources, tile_values * scheme.output.itemsize)


def rule(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """Returns whether a config has 4 warps and at least 128 rows.  With 8 warps Triton ignores `warp_specialize`."""
    return config.num_warps == 4 and config.block_m >= 128


# As many stages as fit with the result; where that is too large in 32 bits, 128 columns.
_WIDE_TILES = Config(128, 256, 64, 4, 3, 16), Config(128, 128, 64, 4, 4, 16)
TUNING = Tuning(
    Config,
    tma_space(Config, (128, 256), num_warps=(4,)),
    Defaults(
        at_both_widths(
            ({"M": 256, "N": 4096}, Config(128, 32, 64, 4, 8, 16)),
            ({"M": 256, "N": 6144}, Config(128, 64, 64, 4, 8, 16)),
            ({"M": 256}, _WIDE_TILES),
            ({"outputs": 524288}, Config(128, 32, 64, 4, 8, 16)),
            ({"outputs": 2097152}, Config(128, 128, 64, 4, 6, 16)),
            ({}, _WIDE_TILES),
        ),
        outputs,
    ),
    footprint,
    rule,
)


# Triton would make K = 1 a constant and remove the loop; its pass fails on the rest.
@triton.jit(do_not_specialize=["K"])
def _gemm(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr, M, N, K, stride_a, stride_b, stride_rm, stride_om,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    if A_TRANSPOSED:
        a_map = tl.make_tensor_descriptor(a_ptr, [K, M], [stride_a, 1], [BLOCK_K, BLOCK_M])
    else:
        a_map = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if B_TRANSPOSED:
        b_map = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_map = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    out_map = tl.make_tensor_descriptor(out_ptr, [M, N], [stride_om, 1], [BLOCK_M, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), warp_specialize=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_map.load([k, row]).T if A_TRANSPOSED else a_map.load([row, k])
            b = b_map.load([column, k]).T if B_TRANSPOSED else b_map.load([k, column])
            accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)  # int64, because row * stride passes 2**31
        columns = column + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            out_mask = (rows < M)[:, None] & (columns < N)[None, :]
            residual = tl.load(residual_ptr + rows[:, None] * stride_rm + columns[None, :], mask=out_mask, other=0.0)
            accumulator += residual.to(tl.float32)
        out_map.store([row, column], accumulator.to(out_ptr.dtype.element_ty))


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Allocates GPU memory for TMA descriptors.  torch aligns the memory and reuses it in stream order."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def divided(of: Arguments) -> Any:
    """Computes the arguments of a kernel launch: the grid, sizes, strides and constants.  The grid has at most one CTA
    per SM."""
    (M, K), N, config = of.a.shape, of.b.shape[1], of.config
    (a, b), c = _operands.stored_operands(of.a, of.b), _operands.stored_output(of.c)
    grid = (min(cdiv(M, config.block_m) * cdiv(N, config.block_n), sm_count(of.a.device)),)
    scalar_args = M, N, K, a.stride, b.stride, _operands.row_stride(of.residual), c.stride
    return grid, scalar_args, _operands.constants(of, a, b)


def _launch(grid: tuple[int], *arguments: Any, **constants: Any) -> None:
    triton.set_allocator(_scratch)
    _gemm[grid](*arguments, **constants)


@kernel(
    backend="triton",
    min_sm=90,
    aligned=("a", "b"),
    empty=_operands.epilogue_alone,
    bind=divided,
    unsupported=partial(_operands.why_not_by_tma, stores=True),
    traffic=_operands.tiles_traffic,
    tuning=TUNING,
    over="persistent",
    shows={
        "": (
            "not below.uses_warp_specialization and uses_warp_specialization; "
            'threads == 384 and in_ptx("setmaxnreg") and stack_bytes == 0; '
            "loop.wgmma > loop.tma == loop.shared_load == loop.shared_store == 0"
        )
    },
)
def warp_specialized(
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
    """Computes `a @ b + bias + residual` on tensor cores, in fp32.  TMA loads the operands and stores the result."""
    grid, scalar_args, constexpr_args = bound
    # Runs in a copy of the context, so that the caller's allocator stays in force outside.
    contextvars.copy_context().run(_launch, grid, a, b, bias, residual, c, *scalar_args, **constexpr_args)
