"""Over fast_accum: every 128 of K the sum moves from the fp8 accumulator to an fp32 one, with its scales.

Hopper's fp8 accumulator keeps 13 bits (see fast_accum.py), so each 128 of K begin a new one, and CUDA cores add it in
fp32: one add per output with one scale per operand, one multiply-add with 1 x 128 and 128 x 128 block scales.  The code
does this explicitly, because `max_num_imprecise_acc=128` in a pipelined loop gives PTX that adds the registers before
it waits for the wgmma that writes them (read in Triton 3.7.1's PTX).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rooflab.kernels._checks import output
from rooflab.kernels._sizes import cdiv
from rooflab.kernels._tma import unchecked_map
from rooflab.kernels.gemm_fp8 import _tiles
from rooflab.kernels.gemm_fp8._operands import block_scaled
from rooflab.kernels.gemm_fp8._tiles import BLOCK_K, Config, check_for_tma, config_of, place, traffic_of, unsupported
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

WIDEST = 128
"""Columns of a tile: those of one block scale, and the most for which two sets of accumulators fit."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that fit with two sets of accumulators."""
    return tuple(_tiles.configs(WIDEST))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Two accumulators per output: fp8's for this 128 of K, and the fp32 one."""
    return _tiles.footprint(config, case, accumulators=2)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One warpgroup up to 64 rows, else two; the most columns with which every SM has a tile."""
    M, N = int(case["M"]), int(case["N"])
    if M <= 64:
        return Config(64, _tiles.columns(M, N, 64, WIDEST), num_warps=4, num_stages=6)
    return Config(128, _tiles.columns(M, N, 128, WIDEST), num_warps=8, num_stages=5)


@triton.jit
def _gemm(
    a_map, b_map, a_scale_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    stride_om,
    HAS_BIAS: tl.constexpr, BLOCK_SCALES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    # int64, because row * stride passes 2**31 from M * N = 2**31 on.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if BLOCK_SCALES:
        a_scales = a_scale_ptr + rows * stride_am
        b_scales = b_scale_ptr + tile_n.to(tl.int64) * BLOCK_N // BLOCK_K * stride_bn
        scale = tl.load(a_scales, mask=rows < M, other=0.0) * tl.load(b_scales)
    for k in range(0, K, BLOCK_K):
        a = a_map.load([tile_m * BLOCK_M, k])
        b = b_map.load([tile_n * BLOCK_N, k])
        if BLOCK_SCALES:
            # Loaded one step before their use, because nothing else hides the loads of scales.
            a_scales += stride_ak
            b_scales += stride_bk
            more = k + BLOCK_K < K
            next_scale = tl.load(a_scales, mask=(rows < M) & more, other=0.0) * tl.load(b_scales, mask=more, other=0.0)
            accumulator += tl.dot(a, b.T) * scale[:, None]
            scale = next_scale
        else:
            accumulator += tl.dot(a, b.T)
    if not BLOCK_SCALES:
        accumulator *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=mask)


@register(
    op="gemm_fp8", name="promoted", role="optimized", backend="triton", min_sm=90, traffic=traffic_of("promoted"),
    unsupported=unsupported, tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """(a_scale a) (b_scale b) + bias, each 128 of K on the fp8 tensor cores and their sums in fp32.

    a: (M, K) e4m3 row-major; b: (K, N) e4m3 column-major, rows of K a multiple of 16 bytes apart; bias: (N,) bf16;
    scales as for `naive`, any strides; returns (M, N) bf16.  Raises `ValueError` on wrong shapes, dtypes or strides.
    """
    M, N, K = check_for_tma(a, b, a_scale, b_scale, bias)
    out = output(out, (M, N), a, torch.bfloat16)
    if not out.numel():
        return out
    if not K:
        return out.zero_() if bias is None else out.copy_(bias.expand(M, N))
    config = config or config_of("promoted", a, b)
    block = block_scaled(a_scale)
    weight = b.mT
    grid = (cdiv(M, config.block_m) * cdiv(N, config.block_n),)
    _gemm[grid](
        unchecked_map(TensorDescriptor, a, [M, K], [a.stride(0), 1], [config.block_m, BLOCK_K]),
        unchecked_map(TensorDescriptor, weight, [N, K], [weight.stride(0), 1], [config.block_n, BLOCK_K]),
        a_scale, b_scale, bias, out,
        M, N, K, *(a_scale.stride() if block else (0, 0)), *(b_scale.stride() if block else (0, 0)), out.stride(0),
        HAS_BIAS=bias is not None, BLOCK_SCALES=block, BLOCK_K=BLOCK_K, **config.launch_arguments,
    )  # fmt: skip
    return out
