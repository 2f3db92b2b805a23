"""Over naive: an online softmax, tile by tile, so scores stay on the chip (Dao, "FlashAttention-2", 2023; Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import get_scale
from rooflab.kernels._checks import output
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._tiles import Config, configs
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 24
"""For pointers, masks and the running peak and sum, in addition to accumulator and scores."""


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: the fp32 accumulator and a tile of scores; shared memory: queries and staged keys and values, as
    Triton allocates them (read in the compiled kernels; tests/test_configs.py compares them).

    Causal programs differ in their work, so `tensor_flops` is 0.
    """
    B, T, H, D = (int(case[key]) for key in ("B", "T", "H", "D"))
    threads = 32 * config.num_warps
    # wgmma (64 rows and more) reads a stage while others are filled; mma.sync frees a stage at once.
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    tiles = 2 * held if config.num_stages > 1 else 1
    return Footprint(
        threads=threads,
        registers=cdiv(config.block_m * (D + config.block_n), threads) + ADDRESS_REGISTERS,
        shared_bytes=(config.block_m + tiles * config.block_n) * D * scheme.activation.itemsize,
        ctas=cdiv(T, config.block_m) * B * H,
    )


def choose(head_dim: int, itemsize: int) -> Config:
    """A tile whose fp32 accumulator and staged keys fit in an SM's registers and shared memory."""
    if itemsize == 4:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
        return Config(32, 32, num_warps=4 if head_dim <= 64 else 8, num_stages=1)
    return Config(128 if head_dim <= 128 else 64, 64, num_warps=8 if head_dim >= 128 else 4, num_stages=2)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim and bytes of a value."""
    return choose(int(case["D"]), scheme.activation.itemsize)


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S"])
def online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, S, H, group, scale_log2, q_stride_b, q_stride_t, q_stride_h,
    k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h, out_stride_b, out_stride_t, out_stride_h,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context.
    tiles = tl.cdiv(T, BLOCK_M)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    first_row = tl.program_id(0) % tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    row_mask = rows < T
    rows64 = rows.to(tl.int64)
    q_offsets = b * q_stride_b + h * q_stride_h + rows64[:, None] * q_stride_t + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_mask[:, None], other=0.0)
    k_base = k_ptr + b * k_stride_b + (h // group) * k_stride_h
    v_base = v_ptr + b * v_stride_b + (h // group) * v_stride_h

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    end = S
    if CAUSAL:
        end = tl.minimum(S, first_row + BLOCK_M + S - T)
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        keys64 = keys.to(tl.int64)
        key_mask = keys < S
        k = tl.load(k_base + keys64[None, :] * k_stride_s + dims[:, None], mask=key_mask[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        seen = key_mask[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + S - T)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The peak of a row that has seen no key is -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weights, 1)
        # V is masked too: memory past the end may hold NaN, and 0 * NaN is NaN.
        v = tl.load(v_base + keys64[:, None] * v_stride_s + dims[None, :], mask=key_mask[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        peak = new_peak

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])


def why_not_taken(q: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if q.shape[-1] not in (16, 32, 64, 128, 256):
        return f"needs a head_dim of 16, 32, 64, 128 or 256, got {q.shape[-1]}"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries."""
    q = inputs.q
    size = q.element_size()
    return Traffic((q.numel() + inputs.k.numel() + inputs.v.numel()) * size, q.numel() * size)


@register(
    op="flash_attention", name="online", role="optimized", backend="triton",
    unsupported=lambda inputs: why_not_taken(inputs.q), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint), fenced_since="3.7",
)  # fmt: skip
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """Attention with an online softmax.  q: (B, T, H, D); k, v: (B, S, H_kv, D); returns (B, T, H, D).

    Any strides with contiguous heads.  Raises `ValueError` on wrong shapes, dtypes or head_dim.
    """
    check_args(q, k, v)
    reason = why_not_taken(q)
    if reason:
        raise ValueError(f"q: {reason}")
    out = output(out, tuple(q.shape), q)
    B, T, H, D = q.shape
    if out.numel() == 0:
        return out
    config = config or default_config("flash_attention", "online", q.dtype, q.device, B=B, T=T, H=H, D=D)
    # One grid axis, because only x may exceed 65,535 programs.
    online_kernel[(cdiv(T, config.block_m) * B * H,)](
        q, k, v, out, T, k.shape[1], H, H // k.shape[2], get_scale(q, softmax_scale) * math.log2(math.e),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        CAUSAL=causal, HEAD_DIM=D, **config.launch_arguments,
    )  # fmt: skip
    return out
