"""Over online: masks only in the tiles that need one.

The diagonal, the far end of a window and the end of the keys cut a few of the key tiles that a tile of queries sees.
Those have their own loops.  The loop over the other tiles compares no position, selects no score and loads without a
predicate; a score costs one multiply-add and one exponential.  The options start here, because in online every tile
would pay for each of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import AttentionLaunch
from rooflab.kernels._attention_configs import Config
from rooflab.kernels.flash_attention._configs import MASKED_TILES
from rooflab.kernels.flash_attention._launch import launch_of, traffic, why_no_tile
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import attend, finish


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, T, S, H, group, window, scale, factor, cap,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context.
    tiles = tl.cdiv(T, BLOCK_M)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    first_row = tl.program_id(0) % tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows64 = rows.to(tl.int64)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = b * q_stride_b + h * q_stride_h + rows64[:, None] * q_stride_t + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    k_base = k_ptr + b * k_stride_b + (h // group) * k_stride_h
    v_base = v_ptr + b * v_stride_b + (h // group) * v_stride_h
    acc, m_i, l_i = attend(
        q, k_base, v_base, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, k_stride_s, v_stride_s,
        window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    result, lse = finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, SINKS)
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


@kernel(
    backend="triton", unsupported=why_no_tile, traffic=traffic, tuning=MASKED_TILES, bind=launch_of("q", "k", "v"),
    fenced_since="3.7.1",
)  # fmt: skip
def masked_tiles(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: Config, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """Masks only in the tiles that the diagonal, a window or an end cuts."""
    _attention[(bound.ctas,)](
        q, k, v, sinks, out, lse, *bound.sizes, *bound.scores, *bound.strides, **bound.flags
    )  # fmt: skip
