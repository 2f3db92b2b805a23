"""Implements the kernel `promoted`.  It adds the product of each 128 values along K to an fp32 accumulator.

The kernel improves on `fast_accum`, whose accumulator keeps only 13 bits after the leading bit.  Each addition takes
one instruction per output.  With one scale per operand, this is an add.  With block scales (1 x 128 and 128 x 128), it
is a multiply-add.

Triton's option `max_num_imprecise_acc=128` gives wrong results in a pipelined loop.  There the PTX of Triton 3.7.1 adds
the registers before the wgmma that writes them is complete.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm._tiles import Config, grouped_tile
from rooflab.kernels.gemm_fp8._configs import PROMOTED
from rooflab.kernels.gemm_fp8._operands import block_scaled, by_maps, tiles_traffic, why_not_operands
from rooflab.kernels.launcher import kernel


@triton.jit
def _gemm(
    a_map, b_map, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    stride_om,
    HAS_BIAS: tl.constexpr, BLOCK_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    # int64, because row * stride passes 2**31 from M * N = 2**31 on.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BLOCK_SCALES:
        a_scales = a_scale_ptr + rows * stride_am
        b_scales = b_scale_ptr + tile_n.to(tl.int64) * BLOCK_N // BLOCK_K * stride_bn
        block_scale = tl.load(a_scales, mask=rows < M, other=0.0) * tl.load(b_scales)
    for k in range(0, K, BLOCK_K):
        a = a_map.load([tile_m * BLOCK_M, k])
        b = b_map.load([tile_n * BLOCK_N, k])
        if BLOCK_SCALES:
            # Loaded one step before their use, because nothing else hides the loads of scales.
            a_scales += stride_ak
            b_scales += stride_bk
            in_k = k + BLOCK_K < K
            next_scale = tl.load(a_scales, mask=(rows < M) & in_k, other=0.0) * tl.load(b_scales, mask=in_k, other=0.0)
            accumulator += tl.dot(a, b.T) * block_scale[:, None]
            block_scale = next_scale
        else:
            accumulator += tl.dot(a, b.T)
    if not BLOCK_SCALES:
        accumulator *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows < M)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


@kernel(
    backend="triton",
    min_sm=90,
    unsupported=why_not_operands,
    aligned=("a", "b"),
    empty=epilogue_alone,
    bind=by_maps,
    traffic=tiles_traffic,
    tuning=PROMOTED,
    over="fast_accum",
    shows={
        "M=2048,N=28672,K=4096,scales={tensor|block},bias=false": (
            r"loop.wgmma == 4 and loop.tma == 2 and spill_stores == 0; max(loop.FADD, loop.FFMA) == 16384 // threads; "
            r'in_sass(r"QGMMA\.\S+ R\d+, gdesc\[UR\d+\], RZ") == 1; in_sass(r"QGMMA\.\S+ R\d+, gdesc\[UR\d+\], ") == 4'
        )
    },
)
def promoted(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    c: Tensor,
    *,
    fast_accum: bool,
    config: Config,
    bound: Any,
) -> None:
    """Computes `(a_scale * a) @ (b_scale * b) + bias`.  Adds the product of each 128 values along K in fp32."""
    a_map, b_map, grid, size_args, strides, stride_om = bound
    _gemm[grid](
        a_map(a),
        b_map(b),
        a_scale,
        b_scale,
        bias,
        c,
        *size_args,
        *strides,
        stride_om,
        HAS_BIAS=bias is not None,
        BLOCK_SCALES=block_scaled(a_scale),
        **config.launch_arguments,
    )
