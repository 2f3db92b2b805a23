"""Over tma: as many CTAs as fit on the SMs are persistent and take one tile of queries after another.

The order of tiles is that of `_order_device.py`.

The loads of a tile start after the store of the tile before: Triton fuses no loop that contains several loops, so loads
do not run on across tiles as in gemm/persistent.py.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from rooflab.kernels._attention import AttentionLaunch
from rooflab.kernels._device import sm_count
from rooflab.kernels.flash_attention._configs import PERSISTENT, PersistentConfig
from rooflab.kernels.flash_attention._launch import launch_of, section_heads, traffic
from rooflab.kernels.flash_attention._maps import nothing_seen, why_not_loaded
from rooflab.kernels.flash_attention._order_device import nth_tile, place
from rooflab.kernels.flash_attention._timeline import TIMELINE, keep
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish
from rooflab.reference.spec import Arguments


@triton.jit(do_not_specialize=["T", "S", "heads", "section", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, timeline_ptr, T, S, H, group, heads, section, window, scale,
    factor, cap, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(T, BLOCK_M)
    tiles = tiles_m * heads
    for turn in range(0, tl.cdiv(tiles, tl.num_programs(0))):
        tile = nth_tile(turn, tl.program_id(0), tl.num_programs(0))
        if tile < tiles:
            if timeline_ptr is not None:
                began = globaltimer()
            tile_m, head = place(tile, tiles_m, heads, section, CAUSAL)
            b = head // H
            h = head % H
            first_row = tile_m * BLOCK_M
            rows = first_row + tl.arange(0, BLOCK_M)
            q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
            acc, m_i, l_i = attend(
                q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window,
                scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            # int64, because offsets of batch, row and head pass 2**31 elements; the maps use 64 bits anyway.
            b64 = b.to(tl.int64)
            h64 = h.to(tl.int64)
            rows64 = rows.to(tl.int64)
            result, lse = finish(acc, m_i, l_i, sinks_ptr, h64 * sinks_stride, SINKS)
            dims = tl.arange(0, BLOCK_D)
            mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
            out_offsets = b64 * out_stride_b + h64 * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
            if LSE:
                lse_offsets = b64 * lse_stride_b + h64 * lse_stride_h + rows64 * lse_stride_t
                tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)
            if timeline_ptr is not None:
                keep(timeline_ptr, head * tiles_m + tile_m, began)


def launch(of: Arguments) -> AttentionLaunch:
    """As many CTAs as fit, and the heads of a section."""
    made, heads = launch_of()(of), of.q.shape[0] * of.q.shape[2]
    section = min(heads, section_heads(of.k, made.sizes[-1]))
    ctas = min(made.ctas, sm_count(of.q.device) * of.config.ctas_per_sm)
    return replace(made, ctas=ctas, sizes=(*made.sizes, heads, section))


@kernel(
    backend="triton", min_sm=90, unsupported=why_not_loaded, aligned=("q", "k", "v"), traffic=traffic,
    tuning=PERSISTENT, bind=launch, empty=nothing_seen,
)  # fmt: skip
def persistent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: PersistentConfig, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """As many CTAs as fit take tile after tile, the longest first."""
    q_map, k_map, v_map = bound.maps
    _attention[(bound.ctas,)](
        q_map(q), k_map(k), v_map(v), sinks, out, lse, TIMELINE.get(), *bound.sizes, *bound.scores, *bound.strides,
        **bound.flags,
    )  # fmt: skip
