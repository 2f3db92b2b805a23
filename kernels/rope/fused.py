"""The kernel `fused` improves on `naive`: one launch rotates q and k, and reads and writes each value once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.rope import SPEC
from rooflab.reference.spec import Arguments

NUM_WARPS = 4
TILE_VALUES = 1024
"""The number of values of a program in each half of the heads: eight for each of 128 threads."""


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    heads,
    num_heads,
    stride_x,
    stride_out,
    cos,
    sin,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    pair_ids = tl.arange(0, BLOCK_HALF)
    mask = (heads < num_heads)[:, None] & (pair_ids < HALF)[None, :]
    if INTERLEAVED:
        first_offsets = 2 * pair_ids[None, :]
        pair_gap = 1
    else:
        first_offsets = pair_ids[None, :]
        pair_gap = HALF
    x_ptrs = x_ptr + heads.to(tl.int64)[:, None] * stride_x + first_offsets
    out_ptrs = out_ptr + heads.to(tl.int64)[:, None] * stride_out + first_offsets
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + pair_gap, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + pair_gap, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_out_ptr, num_heads, num_kv_heads, max_position,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_cos, stride_sin,
    stride_q_out_t, stride_q_out_h, stride_k_out_t, stride_k_out_h,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # token is int64, because token * stride passes 2**31 from T * H * D = 2**31 on.
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    pair_ids = tl.arange(0, BLOCK_HALF)
    # Triton 3.9's interpreter ignores a scalar mask that is broadcast.
    pair_mask = pair_ids < tl.where((position >= 0) & (position < max_position), HALF, 0)
    cos = tl.load(cos_ptr + position * stride_cos + pair_ids, mask=pair_mask, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * stride_sin + pair_ids, mask=pair_mask, other=0.0)[None, :]
    q_blocks = tl.cdiv(num_heads, BLOCK_HEADS)
    head_block = tl.program_id(1)
    head_offsets = tl.arange(0, BLOCK_HEADS)
    if head_block < q_blocks:
        heads = head_block * BLOCK_HEADS + head_offsets
        x_ptr = q_ptr + token * stride_qt
        out_ptr = q_out_ptr + token * stride_q_out_t
        _rotate(x_ptr, out_ptr, heads, num_heads, stride_qh, stride_q_out_h, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        heads = (head_block - q_blocks) * BLOCK_HEADS + head_offsets
        x_ptr = k_ptr + token * stride_kt
        out_ptr = k_out_ptr + token * stride_k_out_t
        _rotate(x_ptr, out_ptr, heads, num_kv_heads, stride_kh, stride_k_out_h, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)


def layout(of: Arguments) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Computes the grid, the sizes and strides, and the constants of a launch."""
    (T, H, D), H_kv = of.q.shape, of.k.shape[1]
    block_pairs = next_power_of_2(D // 2)
    block_heads = min(next_power_of_2(max(H, H_kv)), max(TILE_VALUES // block_pairs, 1))
    strides = (stride for x in (of.q_out, of.k_out) for stride in x.stride()[:2])
    scalar_args = (
        H,
        H_kv,
        of.cos.shape[0],
        *of.q.stride()[:2],
        *of.k.stride()[:2],
        of.cos.stride(0),
        of.sin.stride(0),
        *strides,
    )
    block_sizes = {"HALF": D // 2, "BLOCK_HALF": block_pairs, "BLOCK_HEADS": block_heads}
    constant_args = {**block_sizes, "INTERLEAVED": of.interleaved, "num_warps": NUM_WARPS}
    return (T, cdiv(H, block_heads) + cdiv(H_kv, block_heads)), scalar_args, constant_args


@kernel(
    backend="triton",
    traffic=SPEC.least,
    bind=layout,
    limits={"D": 16384},
    over="joined",
    shows={
        "": (
            'calls("joined").total > 5 and calls("naive").total >= 18 and launched == 1; STG_E_128 == global_store == 4'
        ),
        "T=2048,H=32,H_kv=8,D=128,max_position=131072,interleaved=true": "STG_E_U16 == global_store",
    },
)
def fused(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    *,
    interleaved: bool,
    bound: Any,
) -> None:
    """Rotates q and k in fp32, rounded once.  A position outside the tables gives zeros: a kernel cannot raise."""
    grid, scalar_args, constant_args = bound
    _rope[grid](q, k, cos, sin, positions, q_out, k_out, *scalar_args, **constant_args)
