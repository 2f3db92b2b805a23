"""Over tma: the query heads that share a head of keys share a tile's rows.

A tile of tma has rows of one head, so a short query (a chunk of a prefill, or a few guessed tokens) leaves most rows
empty, and each head of a group loads the same keys again.  Here row r is position r // group and head r % group: T = 16
queries of a group of 4 fill 64 rows, and the group loads a tile of keys once.  A tile also covers fewer positions, so a
causal mask cuts less of it.  Pointers load q and store the result, by rows of a head, because a group is no box of a
tensor map.  There are fewer tiles than in tma, and keys are not split, so fewer SMs may be busy.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import AttentionLaunch
from rooflab.kernels._attention_configs import Config
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._configs import PACKED_GQA
from rooflab.kernels.flash_attention._launch import launch_of, traffic
from rooflab.kernels.flash_attention._maps import nothing_seen, why_keys_not_loaded
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import finish
from rooflab.reference.spec import Arguments


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_ptr, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, T, S, H_kv, group, window, scale, factor, cap,
    q_stride_b, q_stride_t, q_stride_h, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t,
    lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T * group, BLOCK_M)
    b = tl.program_id(0) // tiles // H_kv
    h_kv = tl.program_id(0) // tiles % H_kv
    first_row = tl.program_id(0) % tiles * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, T * group) - 1
    packed = first_row + tl.arange(0, BLOCK_M)
    rows = packed // group
    dims = tl.arange(0, BLOCK_D)
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context; the maps use 64 bits anyway.
    b64 = b.to(tl.int64)
    rows64 = rows.to(tl.int64)
    heads = (h_kv * group + packed % group).to(tl.int64)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = b64 * q_stride_b + (rows64 * q_stride_t + heads * q_stride_h)[:, None] + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    acc, m_i, l_i = attend(
        q, k_map, v_map, b, h_kv, rows, first_row // group, last_row // group, S, T, window, scale, factor, cap,
        CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    result, lse = finish(acc, m_i, l_i, sinks_ptr, heads * sinks_stride, SINKS)
    out_offsets = b64 * out_stride_b + (rows64 * out_stride_t + heads * out_stride_h)[:, None] + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b64 * lse_stride_b + heads * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


def launch(of: Arguments) -> AttentionLaunch:
    """A CTA for a tile of a head of keys."""
    made = launch_of("q")(of)
    T, S, _, group = made.sizes
    B, _, H_kv, _ = of.k.shape
    return replace(made, ctas=cdiv(T * group, of.config.block_m) * B * H_kv, sizes=(T, S, H_kv, group))


@kernel(
    backend="triton", min_sm=90, unsupported=why_keys_not_loaded, aligned=("k", "v"), traffic=traffic,
    tuning=PACKED_GQA, bind=launch, empty=nothing_seen,
)  # fmt: skip
def packed_gqa(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, softmax_scale: float | None, window: int | None, softcap: float | None, sinks: Tensor | None,
    return_lse: bool, config: Config, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """A tile's rows are the positions and the query heads of one head of keys."""
    k_map, v_map = bound.maps
    _attention[(bound.ctas,)](
        q, k_map(k), v_map(v), sinks, out, lse, *bound.sizes, *bound.scores, *bound.strides, **bound.flags
    )
