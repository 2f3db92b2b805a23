"""Over naive: one launch rotates q and k; each value is read once and written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._head_tiles import Config, tiles
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.kernels.tuning import BF16, Defaults, Footprint, Tuning
from rooflab.reference.spec import Arguments, Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers and masks, in addition to the values and the angles."""


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Both halves of a program's heads in fp32 registers."""
    threads = 32 * config.num_warps
    block_half, block_heads = _blocks(config, int(case["H"]), int(case["H_kv"]), int(case["D"]))
    ctas = int(case["T"]) * sum(cdiv(int(case[heads]), block_heads) for heads in ("H", "H_kv"))
    return Footprint(threads, cdiv(2 * block_half * block_heads, threads) + ADDRESS_REGISTERS, 0, ctas)


def _blocks(config: Config, H: int, H_kv: int, D: int) -> tuple[int, int]:
    """The tile of a program: half of a head, and the number of heads."""
    block_half = int(next_power_of_2(D // 2))
    return block_half, min(int(next_power_of_2(max(H, H_kv))), max(config.tile // block_half, 1))


# Eight values of each half for each of 128 threads.
TUNING = Tuning(Config, tiles(256, 32), Defaults((({}, Config(tile=1024, num_warps=4)),)), footprint)


@triton.jit
def _rotate(
    x_ptr, out_ptr, heads, num_heads, stride_x, stride_out, cos, sin,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK_HALF)
    mask = (heads < num_heads)[:, None] & (pairs < HALF)[None, :]
    if INTERLEAVED:
        first = 2 * pairs[None, :]
        gap = 1
    else:
        first = pairs[None, :]
        gap = HALF
    x_ptrs = x_ptr + heads.to(tl.int64)[:, None] * stride_x + first
    out_ptrs = out_ptr + heads.to(tl.int64)[:, None] * stride_out + first
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + gap, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + gap, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


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
    pairs = tl.arange(0, BLOCK_HALF)
    # A scalar mask that is broadcast is no mask for Triton 3.9's interpreter.
    known = pairs < tl.where((position >= 0) & (position < max_position), HALF, 0)
    cos = tl.load(cos_ptr + position * stride_cos + pairs, mask=known, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * stride_sin + pairs, mask=known, other=0.0)[None, :]
    q_blocks = tl.cdiv(num_heads, BLOCK_HEADS)
    block = tl.program_id(1)
    lanes = tl.arange(0, BLOCK_HEADS)
    if block < q_blocks:
        heads = block * BLOCK_HEADS + lanes
        x_ptr = q_ptr + token * stride_qt
        out_ptr = q_out_ptr + token * stride_q_out_t
        _rotate(x_ptr, out_ptr, heads, num_heads, stride_qh, stride_q_out_h, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        heads = (block - q_blocks) * BLOCK_HEADS + lanes
        x_ptr = k_ptr + token * stride_kt
        out_ptr = k_out_ptr + token * stride_k_out_t
        _rotate(x_ptr, out_ptr, heads, num_kv_heads, stride_kh, stride_k_out_h, cos, sin, HALF, BLOCK_HALF, INTERLEAVED)


def traffic(inputs: Arguments) -> Traffic:
    """q and k are read and written; the angles are read once per distinct position (L2 serves repeats)."""
    q, k, cos, positions = inputs.q, inputs.k, inputs.cos, inputs.positions
    tables = len(set(positions.tolist())) * cos.shape[1] * (cos.element_size() + inputs.sin.element_size())
    return Traffic(read_bytes=nbytes(q, k, positions) + tables, write_bytes=nbytes(q, k))


def layout(of: Arguments) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid, the sizes and strides, and the constants of a launch."""
    (T, H, D), H_kv = of.q.shape, of.k.shape[1]
    block_half, block_heads = _blocks(of.config, H, H_kv, D)
    strides = (stride for x in (of.q_out, of.k_out) for stride in x.stride()[:2])
    numbers = (
        H, H_kv, of.cos.shape[0], *of.q.stride()[:2], *of.k.stride()[:2], of.cos.stride(0), of.sin.stride(0), *strides,
    )  # fmt: skip
    blocks = {"HALF": D // 2, "BLOCK_HALF": block_half, "BLOCK_HEADS": block_heads}
    constants = {**blocks, "INTERLEAVED": of.interleaved, "num_warps": of.config.num_warps}
    return (T, cdiv(H, block_heads) + cdiv(H_kv, block_heads)), numbers, constants


@kernel(
    backend="triton", traffic=traffic, tuning=TUNING, bind=layout,
    over="joined", shows={
        "": (
            'calls("joined").total > 5 and calls("naive").total >= 18 and launched == 1; '
            'STG_E_128 == global_store == 4'
        ),
        "T=2048,H=32,H_kv=8,D=128,max_position=131072,interleaved=true": "STG_E_U16 == global_store",
    },
)  # fmt: skip
def fused(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, q_out: Tensor, k_out: Tensor, *,
    interleaved: bool, config: Config, bound: Any,
) -> None:  # fmt: skip
    """In fp32, rounded once; a position outside the tables gives zeros, because a kernel cannot raise."""
    grid, numbers, constants = bound
    _rope[grid](q, k, cos, sin, positions, q_out, k_out, *numbers, **constants)
