"""Over naive: one launch; a program rotates some heads of a token's q, or rotates some of its k and writes them and v
to the token's slot."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rooflab.kernels.configs import default_config
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rope_and_cache._operands import Sizes, check_operands
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 28
"""For pointers and masks, in addition to the values and the angles."""
FEW_TOKENS = 64
"""With fewer tokens, programs with a tile of 1024 would not fill the SMs twice."""


@dataclass(frozen=True)
class Config:
    """One way to launch the kernel."""

    tile: int
    """Values in each half of a program's heads."""
    num_warps: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles of 2 to 16 values of each half per thread."""
    return tuple(
        Config(tile, num_warps)
        for tile, num_warps in itertools.product((128, 256, 512, 1024, 2048), (1, 2, 4, 8))
        if 2 <= tile // (32 * num_warps) <= 16
    )


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """fp32 registers for both halves of a program's heads, and for other values as many as for one half."""
    threads = 32 * config.num_warps
    sizes = Sizes(*(int(case[key]) for key in ("T", "H", "H_kv", "D", "rotary")))
    half, heads = _blocks(config, sizes)
    ctas = sizes.T * (triton.cdiv(sizes.H, heads) + triton.cdiv(sizes.H_kv, heads))
    return Footprint(threads, triton.cdiv(3 * half * heads, threads) + ADDRESS_REGISTERS, 0, ctas)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """For few tokens smaller tiles, so more programs; for many tokens 16 bytes of each half per thread."""
    return Config(tile=512 if int(case["T"]) < FEW_TOKENS else 1024, num_warps=4)


def _blocks(config: Config, sizes: Sizes) -> tuple[int, int]:
    """The tile of a program: at least half of a head, and the number of heads."""
    half = int(triton.next_power_of_2(triton.cdiv(sizes.D, 2)))
    most = int(triton.next_power_of_2(max(sizes.H, sizes.H_kv, 1)))
    return half, min(most, max(config.tile // half, 1))


@triton.jit
def _load_rotated(x_ptr, rows, real, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads and rotates some heads; returns the first and the second values of their pairs in fp32."""
    pairs = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_HALF)
        both = tl.load(x_ptr + rows + columns[None, :], mask=real & (columns < 2 * HALF)[None, :], other=0.0)
        x1, x2 = tl.split(tl.reshape(both.to(tl.float32), [rows.shape[0], BLOCK_HALF, 2]))
    else:
        mask = real & (pairs < HALF)[None, :]
        x1 = tl.load(x_ptr + rows + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + rows + HALF + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def _store(
    out_ptr, rows, real, y1, y2, scale, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    y1 = _scaled(y1, scale, FP8)
    y2 = _scaled(y2, scale, FP8)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    pairs = tl.arange(0, BLOCK_HALF)
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_HALF)
        both = tl.reshape(tl.join(y1, y2), [rows.shape[0], 2 * BLOCK_HALF])
        tl.store(out_ptr + rows + columns[None, :], both.to(kind), mask=real & (columns < 2 * HALF)[None, :])
    else:
        mask = real & (pairs < HALF)[None, :]
        tl.store(out_ptr + rows + pairs[None, :], y1.to(kind), mask=mask)
        tl.store(out_ptr + rows + HALF + pairs[None, :], y2.to(kind), mask=mask)


@triton.jit
def _scaled(x, scale, FP8: tl.constexpr):
    """x in fp32 before the rounding to e4m3: scaled and clamped; unchanged for a cache of another dtype."""
    if FP8:
        # NaN stays NaN: an error in an earlier kernel must not look like a large value.
        quotient = tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
        x = tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _copy(x_ptr, out_ptr, rows, out_rows, real, scale, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
          FP8: tl.constexpr):  # fmt: skip
    """Copies the columns that are not rotated."""
    columns = FROM + tl.arange(0, BLOCK)[None, :]
    mask = real & (columns < TO)
    x = tl.load(x_ptr + rows + columns, mask=mask, other=0.0)
    if FP8:
        x = _scaled(x.to(tl.float32), scale, FP8)
    tl.store(out_ptr + out_rows + columns, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_and_cache(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr,
    k_scale_ptr, v_scale_ptr, num_heads, num_kv_heads, max_position, num_slots, stride_qt, stride_qh,
    stride_q_out_t, stride_q_out_h, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    # Offsets are int64: slot * H_kv * D passes 2**31 in a cache of 4 GiB, token * stride from T * H * D = 2**31 on.
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    # Only programs of k use the slot, but a load here overlaps the load of the position; a load there would not.
    slot = tl.load(slot_mapping_ptr + token)
    pairs = tl.arange(0, BLOCK_HALF)
    known = (position >= 0) & (position < max_position) & (pairs < HALF)
    cos = tl.load(cos_ptr + position * stride_cos + pairs, mask=known, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * stride_sin + pairs, mask=known, other=0.0)[None, :]
    q_blocks = tl.cdiv(num_heads, BLOCK_HEADS)
    block = tl.program_id(1)
    if block < q_blocks:
        heads = (block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        real = heads < num_heads
        rows = token * stride_qt + heads.to(tl.int64) * stride_qh
        y1, y2 = _load_rotated(q_ptr, rows, real, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
        out_rows = token * stride_q_out_t + heads.to(tl.int64) * stride_q_out_h
        _store(q_out_ptr, out_rows, real, y1, y2, 1.0, HALF, BLOCK_HALF, INTERLEAVED, False)
        if 2 * HALF < D:
            _copy(q_ptr, q_out_ptr, rows, out_rows, real, 1.0, 2 * HALF, D, BLOCK_TAIL, False)
    else:
        # A slot past the cache is skipped too, so the kernel never writes outside the cache.
        if (slot >= 0) & (slot < num_slots):
            heads = ((block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
            real = heads < num_kv_heads
            target = (slot * num_kv_heads + heads) * D
            k_scale = 1.0
            v_scale = 1.0
            if FP8:
                k_scale = tl.load(k_scale_ptr + heads, mask=real, other=1.0)
                v_scale = tl.load(v_scale_ptr + heads, mask=real, other=1.0)
            k_rows = token * stride_kt + heads.to(tl.int64) * stride_kh
            v_rows = token * stride_vt + heads.to(tl.int64) * stride_vh
            y1, y2 = _load_rotated(k_ptr, k_rows, real, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
            _copy(v_ptr, v_cache_ptr, v_rows, target, real, v_scale, 0, D, 2 * BLOCK_HALF, FP8)
            _store(k_cache_ptr, target, real, y1, y2, k_scale, HALF, BLOCK_HALF, INTERLEAVED, FP8)
            if 2 * HALF < D:
                _copy(k_ptr, k_cache_ptr, k_rows, target, real, k_scale, 2 * HALF, D, BLOCK_TAIL, FP8)


def traffic(inputs: Arguments) -> Traffic:
    """q is read and written, and the rows with a slot; the angles are read once per distinct position."""
    q, k, cos, positions, slot_mapping = inputs.q, inputs.k, inputs.cos, inputs.positions, inputs.slot_mapping
    written = int((slot_mapping >= 0).sum()) * k.shape[1] * k.shape[2]
    tables = len(set(positions.tolist())) * cos.shape[1] * (cos.element_size() + inputs.sin.element_size())
    read = nbytes(q, positions, slot_mapping, inputs.k_scale, inputs.v_scale) + 2 * written * k.element_size() + tables
    return Traffic(read, nbytes(q) + 2 * written * inputs.k_cache.element_size())


@register(
    op="rope_and_cache", name="fused", role="optimized", backend="triton", traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool = False,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Rotates q into q_out and writes the rotated k, and v, to their slots; skips a slot outside the cache.

    q: (T, H, D); k, v: (T, H_kv, D); cos, sin: (max_position, R/2) fp32, R <= D; positions, slot_mapping: (T,) int64;
    k_cache, v_cache: (num_blocks, block_size, H_kv, D); k_scale, v_scale: (H_kv,) fp32 of an e4m3 cache.  A position
    outside the tables rotates to zeros, because a kernel cannot raise.  Raises `ValueError` on wrong shapes or dtypes.
    """
    sizes = check_operands(q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    T, H, H_kv, D, R = sizes
    if not T or not D:
        return
    config = config or default_config("rope_and_cache", "fused", q.dtype, q.device, T=T, H=H, H_kv=H_kv, D=D, rotary=R)
    block_half, block_heads = _blocks(config, sizes)
    _rope_and_cache[(T, triton.cdiv(H, block_heads) + triton.cdiv(H_kv, block_heads))](
        q, k, v, cos, sin, positions, q_out, k_cache, v_cache, slot_mapping, k_scale, v_scale, H, H_kv, cos.shape[0],
        k_cache.shape[0] * k_cache.shape[1], *q.stride()[:2], *q_out.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        cos.stride(0), sin.stride(0),
        D=D, HALF=R // 2, BLOCK_HALF=block_half, BLOCK_HEADS=block_heads,
        BLOCK_TAIL=triton.next_power_of_2(max(D - R, 1)), INTERLEAVED=interleaved, FP8=k_scale is not None,
        num_warps=config.num_warps,
    )  # fmt: skip
