"""Implements the kernel `online`, the version after `naive`: computes the softmax tile by tile (online softmax), so the
scores stay on the chip.  Papers: Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, "Online normalizer calculation
for softmax", 2018.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import LOG2E, get_scale, traffic
from rooflab.kernels._attention_configs import Config, by_pointers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.launcher import kernel
from rooflab.kernels.takes import HALF_DTYPES

TUNING = by_pointers(weights=False, widest=Config(32, 32, 8, 1))


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S"])
def online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, S, H, group, scale_log2, q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context.
    row_tiles = tl.cdiv(T, BLOCK_M)
    b = (tl.program_id(0) // row_tiles // H).to(tl.int64)
    h = (tl.program_id(0) // row_tiles % H).to(tl.int64)
    first_row = tl.program_id(0) % row_tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    row_mask = rows < T
    row_indices = rows.to(tl.int64)
    q_offsets = b * q_stride_b + h * q_stride_h + row_indices[:, None] * q_stride_t + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None], other=0.0)
    k_base = k_ptr + b * k_stride_b + (h // group) * k_stride_h
    v_base = v_ptr + b * v_stride_b + (h // group) * v_stride_h

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    k_end = S
    if CAUSAL:
        k_end = tl.minimum(S, first_row + BLOCK_M + S - T)
    for k_start in range(0, k_end, BLOCK_N):
        keys = k_start + tl.arange(0, BLOCK_N)
        key_indices = keys.to(tl.int64)
        key_mask = keys < S
        k = tl.load(k_base + key_indices[None, :] * k_stride_s + dims[:, None], mask=key_mask[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        visible_mask = key_mask[None, :]
        if CAUSAL:
            visible_mask = visible_mask & (keys[None, :] <= rows[:, None] + S - T)
        scores = tl.where(visible_mask, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        # m_i of a row that has seen no key is -inf, and -inf - -inf would be NaN.
        finite_max = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - finite_max[:, None])
        rescale_factor = tl.exp2(m_i - finite_max)
        l_i = l_i * rescale_factor + tl.sum(weights, 1)
        # V is masked too: memory past the end may hold NaN, and 0 * NaN is NaN.
        v = tl.load(v_base + key_indices[:, None] * v_stride_s + dims[None, :], mask=key_mask[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale_factor[:, None], input_precision="ieee")
        m_i = m_new

    out_values = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out_offsets = b * out_stride_b + h * out_stride_h + row_indices[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, out_values.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])


@kernel(
    backend="triton",
    dtypes={"q": (torch.float32, *HALF_DTYPES)},
    limits={"D": (16, 32, 64, 128, 256)},
    traffic=traffic,
    tuning=TUNING,
    fenced_since="3.7.1",
    over="naive",
    shows={
        "": (
            'calls("naive").total >= 6 and launched == 1; '
            "loop.wgmma > 0 and loop.cp_async > 0 and loop.global_store == 0"
        )
    },
)
def online(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, causal: bool, softmax_scale: float | None, config: Config
) -> None:
    """Computes attention in one pass over the keys, with a running maximum and sum.  Applies a mask in every tile."""
    B, T, H, D = q.shape
    # One grid axis, because only x may exceed 65,535 programs.
    online_kernel[(cdiv(T, config.block_m) * B * H,)](
        q, k, v, out, T, k.shape[1], H, H // k.shape[2], get_scale(q, softmax_scale) * LOG2E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        CAUSAL=causal, HEAD_DIM=D, **config.launch_arguments,
    )  # fmt: skip
