"""Over masked_tiles: the tensor memory accelerator (TMA) loads the tiles of q, k and v.

One thread issues the load of a tile; with cp.async every thread needs an address, a mask and an instruction for each 16
bytes, that is registers and issue slots that the exponentials need.  A map ends with its sequence and its head, and TMA
gives zeros beyond, so neither a short last tile nor a padded head needs a mask.  A map costs the host a driver call per
launch, and needs addresses and strides of whole 16 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from rooflab.kernels._attention import AttentionLaunch
from rooflab.kernels._attention_configs import Config
from rooflab.kernels.flash_attention._configs import TMA
from rooflab.kernels.flash_attention._launch import launch_of, traffic
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_loaded
from rooflab.kernels.flash_attention._timeline import TIMELINE, keep
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish


@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, timeline_ptr, T, S, H, group, window, scale, factor, cap,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if timeline_ptr is not None:
        began = globaltimer()
    tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    first_row = tl.program_id(0) % tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    acc, m_i, l_i = attend(
        q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window, scale,
        factor, cap, CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context; the maps use 64 bits anyway.
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    result, lse = finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, SINKS)
    rows64 = rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)
    if timeline_ptr is not None:
        keep(timeline_ptr, tl.program_id(0), began)


@kernel(
    backend="triton", min_sm=90, unsupported=why_not_loaded, aligned=("q", "k", "v"), traffic=traffic, tuning=TMA,
    bind=launch_of(), empty=nothing_seen,
)  # fmt: skip
def tma(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: Config, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """One thread loads the tiles of q, k and v, with zeros past the ends."""
    q_map, k_map, v_map = bound.maps
    _attention[(bound.ctas,)](
        q_map(q), k_map(k), v_map(v), sinks, out, lse, TIMELINE.get(), *bound.sizes, *bound.scores, *bound.strides,
        **bound.flags,
    )  # fmt: skip
