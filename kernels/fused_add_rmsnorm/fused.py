"""Implements `fused`, the version after `naive`: one pass computes the sum and its RMSNorm, and writes both."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._pdl import pdl_arguments
from rooflab.kernels._rows_triton import LIMITS, TUNING, Config
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.fused_add_rmsnorm import SPEC


@triton.jit
def _fused_add_rmsnorm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr, T, H, stride_x, stride_residual, stride_out,
    stride_new_residual, eps, weight_offset,
    ROUND_FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # rows are int64, because row * stride passes 2**31 from T * H = 2**31 on.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    tile_mask = (rows < T) & (columns < H)
    weight = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32) + weight_offset
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        # Keeps the weight's load before the row's: ptxas would move it behind the sum, and the program would wait for
        # memory twice.  The barrier does not wait for the load.
        tl.debug_barrier()
    x = tl.load(x_ptr + rows * stride_x + columns, mask=tile_mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + rows * stride_residual + columns, mask=tile_mask, other=0.0).to(tl.float32)
    # The sum is rounded before the norm, so the norm and the next layer see the same numbers.
    rounded_sum = (x + residual).to(new_residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + rows * stride_new_residual + columns, rounded_sum, mask=tile_mask)
    sum_fp32 = rounded_sum.to(tl.float32)
    # The masked lanes are 0, so they do not change the sum, and the divisor is H, not BLOCK_H.
    rms_scale = tl.rsqrt(tl.sum(sum_fp32 * sum_fp32, axis=1) / H + eps)
    normed_rows = sum_fp32 * rms_scale[:, None]
    if ROUND_FIRST:
        normed_rows = normed_rows.to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + rows * stride_out + columns, (normed_rows * weight).to(out_ptr.dtype.element_ty), mask=tile_mask)


@kernel(
    backend="triton",
    limits=LIMITS,
    traffic=SPEC.least,
    tuning=TUNING,
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 9 and launched == 1; '
            "LDG_E_128 == global_load == 6 and STG_E_128 == global_store == 4; not loops"
        )
    },
)
def fused(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    new_residual: Tensor,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    config: Config,
) -> None:
    """Computes `s = x + residual` and `rmsnorm(s)`.  A program has complete rows.  The norm is fp32, rounded once."""
    T, H = x.shape
    _fused_add_rmsnorm[(cdiv(T, config.block_t),)](
        x, residual, weight, out, new_residual, T, H, x.stride(0), residual.stride(0), out.stride(0),
        new_residual.stride(0), eps, weight_offset,
        ROUND_FIRST=round_first, BLOCK_T=config.block_t, BLOCK_H=next_power_of_2(H),
        num_warps=config.num_warps, **pdl_arguments(),
    )  # fmt: skip
