"""The kernel `fused` makes one launch for all steps of `naive`.  A program normalizes and rotates some heads of q or of
k, for some tokens.  The programs for k also write k and v to the tokens' slots.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._pdl import pdl_arguments
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

NUM_WARPS = 4


@triton.jit
def _load(
    x_ptr,
    rows,
    real,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Loads heads in fp32.  Returns three parts: the first values of the rotated pairs, their second values, and the
    columns that are not rotated."""
    pair_ids = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_HALF)
        values = tl.load(x_ptr + rows + columns[None, :], mask=real & (columns < 2 * HALF)[None, :], other=0.0)
        x1, x2 = tl.split(tl.reshape(values.to(tl.float32), [rows.shape[0], BLOCK_HALF, 2]))
    else:
        pair_mask = real & (pair_ids < HALF)[None, :]
        x1 = tl.load(x_ptr + rows + pair_ids[None, :], mask=pair_mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + rows + HALF + pair_ids[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    tail_values = tl.zeros([rows.shape[0], BLOCK_TAIL], tl.float32)
    if 2 * HALF < D:
        columns = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]
        tail_values = tl.load(x_ptr + rows + columns, mask=real & (columns < D), other=0.0).to(tl.float32)
    return x1, x2, tail_values


@triton.jit
def _store_pairs(out_ptr, rows, real, y1, y2, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair_ids = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_HALF)
        values = tl.reshape(tl.join(y1, y2), [y1.shape[0], 2 * BLOCK_HALF])
        tl.store(out_ptr + rows + columns[None, :], values.to(out_dtype), mask=real & (columns < 2 * HALF)[None, :])
    else:
        pair_mask = real & (pair_ids < HALF)[None, :]
        tl.store(out_ptr + rows + pair_ids[None, :], y1.to(out_dtype), mask=pair_mask)
        tl.store(out_ptr + rows + HALF + pair_ids[None, :], y2.to(out_dtype), mask=pair_mask)


@triton.jit
def _scaled(x, scale, FP8: tl.constexpr):
    """Returns the fp32 values `x`.  With `FP8`, divides them by `scale` and clamps them to the range of e4m3."""
    if FP8:
        # NaN stays NaN: an error in an earlier kernel must not look like a large value.
        scaled_x = tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
        x = tl.clamp(scaled_x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _angles(position, cos_ptr, sin_ptr, stride_cos, stride_sin, max_position, HALF: tl.constexpr, BLOCK: tl.constexpr):
    pair_ids = tl.arange(0, BLOCK)[None, :]
    angle_mask = (position >= 0) & (position < max_position) & (pair_ids < HALF)
    cos = tl.load(cos_ptr + position * stride_cos + pair_ids, mask=angle_mask, other=0.0)
    sin = tl.load(sin_ptr + position * stride_sin + pair_ids, mask=angle_mask, other=0.0)
    return cos, sin


@triton.jit
def _turn(
    x_ptr, v_ptr, out_ptr, norm_ptr, rows, v_rows, out_rows, real, stored, position, scale, cos_ptr, sin_ptr,
    stride_cos, stride_sin, max_position, eps, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Applies RMSNorm (if there are norm weights) and RoPE to heads of q or k, and stores the result.  Also loads heads
    of v, if `v_ptr` is given, and returns them."""
    if norm_ptr is not None:
        norm_row = tl.zeros([1, 1], tl.int32)
        w1, w2, tail_weights = _load(norm_ptr, norm_row, norm_row == 0, D, HALF, BLOCK_HALF, BLOCK_TAIL, INTERLEAVED)
    if PDL:
        # No kernel of a step writes weights, positions, slots and tables.
        cos, sin = _angles(position, cos_ptr, sin_ptr, stride_cos, stride_sin, max_position, HALF, BLOCK_HALF)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    elif norm_ptr is not None:
        # Keeps the weight's load before the row's: ptxas would move it behind the sum, and the program would wait for
        # memory twice.  The barrier does not wait for the load.
        tl.debug_barrier()
    v = 0.0
    if v_ptr is not None:
        columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        v = tl.load(v_ptr + v_rows + columns, mask=real & (columns < D), other=0.0)
    x1, x2, tail_values = _load(x_ptr, rows, real, D, HALF, BLOCK_HALF, BLOCK_TAIL, INTERLEAVED)
    if not PDL:  # loads that wait for the position follow loads that do not
        cos, sin = _angles(position, cos_ptr, sin_ptr, stride_cos, stride_sin, max_position, HALF, BLOCK_HALF)
    if norm_ptr is not None:
        square_sum = tl.sum(x1 * x1 + x2 * x2, axis=1) + tl.sum(tail_values * tail_values, axis=1)
        inverse_rms = tl.rsqrt(square_sum / D + eps)[:, None]
        x1, x2, tail_values = x1 * inverse_rms * w1, x2 * inverse_rms * w2, tail_values * inverse_rms * tail_weights
    y1, y2 = _scaled(x1 * cos - x2 * sin, scale, FP8), _scaled(x2 * cos + x1 * sin, scale, FP8)
    _store_pairs(out_ptr, out_rows, stored, y1, y2, HALF, BLOCK_HALF, INTERLEAVED)
    if 2 * HALF < D:
        columns = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]
        scaled_tail = _scaled(tail_values, scale, FP8).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_rows + columns, scaled_tail, mask=stored & (columns < D))
    return v


@triton.jit
def _rope_and_cache(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    k_scale_ptr, v_scale_ptr, q_norm_ptr, k_norm_ptr, T, max_position, num_slots, stride_qt, stride_qh, stride_q_out_t,
    stride_q_out_h, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin, eps, H: tl.constexpr,
    H_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, Q_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr, K_TOKENS: tl.constexpr, K_HEADS: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Offsets are int64: slot * H_kv * D passes 2**31 in a cache of 4 GiB, token * stride from T * H * D = 2**31 on.
    program_index = tl.program_id(0)
    # The heads are constants, so that a program finds its place without a division.
    q_blocks: tl.constexpr = tl.cdiv(H, Q_HEADS)
    q_programs = tl.cdiv(T, Q_TOKENS) * q_blocks
    if program_index < q_programs:
        row_index = tl.arange(0, Q_TOKENS * Q_HEADS)[:, None]
        tokens = (program_index // q_blocks).to(tl.int64) * Q_TOKENS + row_index // Q_HEADS
        heads = (program_index % q_blocks).to(tl.int64) * Q_HEADS + row_index % Q_HEADS
        mask = (tokens < T) & (heads < H)
        position = tl.load(positions_ptr + tokens, mask=tokens < T, other=-1)
        _turn(
            q_ptr, None, q_out_ptr, q_norm_ptr, tokens * stride_qt + heads * stride_qh, 0,
            tokens * stride_q_out_t + heads * stride_q_out_h, mask, mask, position, 1.0, cos_ptr, sin_ptr, stride_cos,
            stride_sin, max_position, eps, D, HALF, BLOCK_HALF, BLOCK_TAIL, INTERLEAVED, False, PDL,
        )  # fmt: skip
    else:
        program_index -= q_programs
        k_blocks: tl.constexpr = tl.cdiv(H_KV, K_HEADS)
        row_index = tl.arange(0, K_TOKENS * K_HEADS)[:, None]
        tokens = (program_index // k_blocks).to(tl.int64) * K_TOKENS + row_index // K_HEADS
        heads = (program_index % k_blocks).to(tl.int64) * K_HEADS + row_index % K_HEADS
        mask = (tokens < T) & (heads < H_KV)
        slot = tl.load(slot_mapping_ptr + tokens, mask=tokens < T, other=-1)
        position = tl.load(positions_ptr + tokens, mask=tokens < T, other=-1)
        # A slot past the cache is skipped too, so the kernel never writes outside the cache.
        store_mask = mask & (slot >= 0) & (slot < num_slots)
        k_scale = 1.0
        v_scale = 1.0
        if FP8:
            k_scale = tl.load(k_scale_ptr + heads, mask=mask, other=1.0)
            v_scale = tl.load(v_scale_ptr + heads, mask=mask, other=1.0)
        offsets = (slot * H_KV + heads) * D
        v = _turn(
            k_ptr, v_ptr, k_cache_ptr, k_norm_ptr, tokens * stride_kt + heads * stride_kh,
            tokens * stride_vt + heads * stride_vh, offsets, mask, store_mask, position, k_scale, cos_ptr, sin_ptr,
            stride_cos, stride_sin, max_position, eps, D, HALF, BLOCK_HALF, BLOCK_TAIL, INTERLEAVED, FP8, PDL,
        )  # fmt: skip
        if FP8:
            v = _scaled(v.to(tl.float32), v_scale, FP8)
        columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        tl.store(v_cache_ptr + offsets + columns, v.to(v_cache_ptr.dtype.element_ty), mask=store_mask & (columns < D))


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of q, k and v of all tokens, because all are read.  Angles count once per position."""
    q, k, cos, positions, slots = inputs.q, inputs.k, inputs.cos, inputs.positions, inputs.slot_mapping
    written_values = int((slots >= 0).sum()) * k.shape[1] * k.shape[2]
    angle_bytes = len(set(positions.tolist())) * cos.shape[1] * (cos.element_size() + inputs.sin.element_size())
    vector_bytes = nbytes(inputs.k_scale, inputs.v_scale, inputs.q_norm, inputs.k_norm)
    read_bytes = nbytes(q, k, inputs.v, positions, slots) + vector_bytes + angle_bytes
    return Traffic(read_bytes, nbytes(q) + 2 * written_values * inputs.k_cache.element_size())


def layout(of: Arguments) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Computes the grid, the sizes and strides, and the constants of a launch."""
    (T, H, D), H_kv, rotary_dim = of.q.shape, of.k.shape[1], 2 * of.cos.shape[1]
    block_pairs = next_power_of_2(cdiv(D, 2))
    # For few tokens, programs of 1024 values would not fill the SMs twice; else a thread has 16 bytes of each half.
    rows = max((512 if T < 64 else 1024) // block_pairs, 1)
    q_heads, k_heads = (min(rows, next_power_of_2(max(heads, 1))) for heads in (H, H_kv))
    q_tokens, k_tokens = rows // q_heads, rows // k_heads
    strides = (stride for x in (of.q, of.q_out, of.k, of.v) for stride in x.stride()[:2])
    num_slots = of.k_cache.shape[0] * of.k_cache.shape[1]
    scalar_args = (T, of.cos.shape[0], num_slots, *strides, of.cos.stride(0), of.sin.stride(0))
    constant_args = {
        "H": H,
        "H_KV": H_kv,
        "D": D,
        "HALF": rotary_dim // 2,
        "BLOCK_HALF": block_pairs,
        "Q_TOKENS": q_tokens,
        "Q_HEADS": q_heads,
        "K_TOKENS": k_tokens,
        "K_HEADS": k_heads,
        "BLOCK_TAIL": next_power_of_2(max(D - rotary_dim, 1)),
        "INTERLEAVED": of.interleaved,
        "FP8": of.k_scale is not None,
        "num_warps": NUM_WARPS,
    }
    return (cdiv(T, q_tokens) * cdiv(H, q_heads) + cdiv(T, k_tokens) * cdiv(H_kv, k_heads),), scalar_args, constant_args


@kernel(
    backend="triton",
    traffic=traffic,
    bind=layout,
    limits={"D": 8192},
    over="naive",
    shows={"": ('calls("naive").total >= 25 and launched == 1; STG_E_128 > 0 and shared_load == barrier == 0')},
)
def fused(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, slot_mapping: Tensor, *,
    interleaved: bool, k_scale: Tensor | None, v_scale: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None,
    norm_eps: float, bound: Any,
) -> None:  # fmt: skip
    """Normalizes and rotates q and k in fp32, rounded once, and writes k and v to the cache.  Skips a slot outside the
    cache.  A position outside the tables gives zeros, because a kernel cannot raise."""
    grid, scalar_args, constant_args = bound
    _rope_and_cache[grid](
        q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, k_scale, v_scale, q_norm, k_norm,
        *scalar_args, norm_eps, **constant_args, **pdl_arguments(),
    )  # fmt: skip
