"""Over naive: one launch for all sequences, with an online softmax (Dao, "FlashAttention-2", 2023).

A program is a tile of queries of one sequence and head; if its tile is past the sequence's end, it exits at once.  The
tiles with the most keys come first: a causal sequence's last rows see all keys, and long tiles must not come at the end
(longest processing time first, Graham, 1969).
"""

from __future__ import annotations

import itertools

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import AttentionLaunch, softmax_numbers, strides_of
from rooflab.kernels._attention_configs import Config, padded
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.flash_attention._configs import by_pointers
from rooflab.kernels.flash_attention_varlen._args import traffic
from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.attention import attend, finish
from rooflab.reference.spec import Arguments

TUNING = by_pointers("masked_tiles", weights=False, others=32)


# Arguments that change from batch to batch are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["tiles", "sequences", "window"])
def online_varlen_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, out_ptr, lse_ptr, tiles, sequences, H, group, window, scale,
    factor, cap, q_stride_t, q_stride_h, k_stride_s, k_stride_h, v_stride_s, v_stride_h, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    # Tiles of the same number of all sequences and heads are neighbours; the last rows come first.
    tile = tiles - 1 - place // (sequences * H)
    b = place // H % sequences
    h = (place % H).to(tl.int64)
    first_q = tl.load(cu_q_ptr + b)
    T = tl.load(cu_q_ptr + b + 1) - first_q
    first_row = tile * BLOCK_M
    if first_row >= T:
        return
    first_k = tl.load(cu_k_ptr + b)
    S = tl.load(cu_k_ptr + b + 1) - first_k
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    # int64, because offsets of token and head pass 2**31 elements in a long batch.
    tokens = (first_q + rows).to(tl.int64)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + tokens[:, None] * q_stride_t + h * q_stride_h + dims[None, :], mask=mask, other=0.0)
    k_base = k_ptr + first_k.to(tl.int64) * k_stride_s + h // group * k_stride_h
    v_base = v_ptr + first_k.to(tl.int64) * v_stride_s + h // group * v_stride_h
    acc, m_i, l_i = attend(
        q, k_base, v_base, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, k_stride_s, v_stride_s,
        window, scale, factor, cap, CAUSAL, WINDOW, CAP, NEGATED, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    result, lse = finish(acc, m_i, l_i, sinks_ptr, h * sinks_stride, SINKS)
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * out_stride_t + h * out_stride_h + dims[None, :], result, mask=mask)
    if LSE:
        tl.store(lse_ptr + tokens * lse_stride_t + h * lse_stride_h, lse, mask=rows < T)


def launch(of: Arguments) -> AttentionLaunch:
    """A CTA for each tile of the longest sequence, of all sequences and heads."""
    (_, H, D), B, config = of.q.shape, len(of.cu_seqlens_q) - 1, of.config
    tiles = cdiv(of.max_seqlen_q, config.block_m)
    windowed = of.window is not None and of.window < of.max_seqlen_k  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(of.q, of.softmax_scale, of.softcap)
    strides = itertools.chain(*(x.stride()[:2] for x in (of.q, of.k, of.v, of.out)))
    return AttentionLaunch(
        tiles * B * H,
        (tiles, B, H, H // of.k.shape[1]),
        (of.window if windowed else 0, scale, factor, cap),
        (*strides, *strides_of(of.lse, 2), *strides_of(of.sinks, 1)),
        {
            "CAUSAL": of.causal, "WINDOW": windowed, "CAP": of.softcap is not None, "NEGATED": negated,
            "SINKS": of.sinks is not None, "LSE": of.return_lse, "HEAD_DIM": D, "BLOCK_D": padded(D),
            **config.launch_arguments,
        },
    )  # fmt: skip


@kernel(
    backend="triton", limits={"D": range(16, 257)}, traffic=traffic, tuning=TUNING, bind=launch, fenced_since="3.7.1"
)
def online(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, out: Tensor, lse: Tensor | None, *,
    max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, return_lse: bool, config: Config, bound: AttentionLaunch,
) -> None:  # fmt: skip
    """One launch for all sequences.  Rows past the last offset are not written: on a GPU only `ROOFLAB_CHECK_VALUES`
    finds them."""
    if bound.ctas:
        online_varlen_kernel[(bound.ctas,)](
            q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, out, lse, *bound.sizes, *bound.scores, *bound.strides,
            **bound.flags,
        )  # fmt: skip
