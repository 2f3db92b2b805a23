"""Over tma: queries, keys and values in e4m3 with one scale per head, on the fp8 tensor cores.

The scales of q and k go into the factor of the exponent, once per tile; the scale of v goes into the result.  Weights
are e4m3 between 2**-9 and 2**8: their exponents are shifted by 8, and the sum that divides them is too.  fp32 registers
add each tile's product with the values, because the fp8 accumulator keeps 14 bits (see gemm_fp8/promoted.py).

Tried, predicted, not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import SMALLEST_SCALE, AttentionLaunch, strides_of
from rooflab.kernels._attention_configs import Config
from rooflab.kernels.flash_attention import _launch
from rooflab.kernels.flash_attention._configs import FP8, values_in_fp8
from rooflab.kernels.flash_attention._launch import launch_of
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_loaded_in_fp8
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish
from rooflab.reference.flash_attention import keys_contiguous
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

RANGE: tl.constexpr = tl.constexpr(8)
"""The exponent of the largest weight."""
UNIT: tl.constexpr = tl.constexpr(2.0**-8)
SMALLEST_FACTOR: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def scale_of(scale_ptr, b, h, stride_b, stride_h):
    """A head's scale; 1 if `scale_ptr` is None."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h)
    return scale


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, T, S, H, group, window,
    scale, factor, cap, q_scale_stride_b, q_scale_stride_h, k_scale_stride_b, k_scale_stride_h, v_scale_stride_b,
    v_scale_stride_h, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, V_COLUMNS: tl.constexpr, V_FP8: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    # A head's last rows first: under a causal mask they take longest, and the grid should end with short tiles.
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    products = scale_of(q_scale_ptr, b, h, q_scale_stride_b, q_scale_stride_h) * scale_of(
        k_scale_ptr, b, h // group, k_scale_stride_b, k_scale_stride_h
    )
    if CAP:
        scale *= products
    else:
        factor = tl.maximum(factor * products, SMALLEST_FACTOR)
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    acc, m_i, l_i = attend(
        q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window, scale,
        factor, cap, CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N, RANGE, V_COLUMNS, V_FP8,
    )  # fmt: skip
    v_scale = scale_of(v_scale_ptr, b, h // group, v_scale_stride_b, v_scale_stride_h)
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context; the maps use 64 bits anyway.
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    result, lse = finish(acc * (v_scale * UNIT), m_i, l_i * UNIT, sinks_ptr, h * sinks_stride, SINKS)
    rows64 = rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


def traffic(inputs: Arguments) -> Traffic:
    """As in the other kernels, with a bf16 result and the scales."""
    moved, scales = _launch.traffic(inputs), nbytes(inputs.q_scale, inputs.k_scale, inputs.v_scale)
    return Traffic(moved.read_bytes + scales, moved.write_bytes + nbytes(inputs.q))


def launch(of: Arguments) -> AttentionLaunch:
    """Also the strides of the scales, and how values are stored."""
    made, columns = launch_of()(of), keys_contiguous(of.v)
    scales = [*strides_of(of.q_scale, 2), *strides_of(of.k_scale, 2), *strides_of(of.v_scale, 2)]
    flags = {"V_COLUMNS": columns, "V_FP8": values_in_fp8(columns, of.q.shape[-1])}
    return replace(made, strides=(*scales, *made.strides), flags=made.flags | flags)


@kernel(
    backend="triton", min_sm=90, unsupported=why_not_loaded_in_fp8, aligned=("q", "k", "v"), traffic=traffic,
    tuning=FP8, bind=launch, empty=nothing_seen,
)  # fmt: skip
def fp8(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, return_lse: bool, config: Config,
    bound: AttentionLaunch,
) -> None:  # fmt: skip
    """Products in e4m3; values along their keys are multiplied in e4m3 too, others in fp16."""
    q_map, k_map, v_map = bound.maps
    _attention[(bound.ctas,)](
        q_map(q), k_map(k), v_map(v), sinks, q_scale, k_scale, v_scale, out, lse, *bound.sizes, *bound.scores,
        *bound.strides, **bound.flags,
    )  # fmt: skip
