"""One launch for all sequences, softmax taken online (Dao, "FlashAttention-2", 2023): a program is a tile of queries of
one sequence and head, and one whose tile lies past its sequence's end leaves at once.

The tiles with the most keys come first: a causal sequence's last rows see all keys, its first rows a few, and what is
long must not be left for the end (longest processing time first, Graham, 1969).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import LN2, LOG2E, Returned, capped, check_options, get_scale, outputs
from rooflab.kernels.configs import BF16, Footprint, default_config, legal_by
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.registry import register
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 32
"""Pointers, masks and the running peak and sum, beside accumulator and scores."""


@dataclass(frozen=True)
class Config:
    """One way to launch the kernel: query and key tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles that a warp's rows divide, with every depth of pipeline."""
    if scheme.activation == torch.float32:
        return tuple(itertools.starmap(Config, itertools.product((16, 32, 64), (16, 32, 64), (4, 8), (1, 2))))
    return tuple(itertools.starmap(Config, itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """As flash_attention/online's: accumulator and scores in registers, queries and staged keys and values in shared
    memory.  Programs differ in their work, so none is said."""
    B, T, H = (int(case[key]) for key in ("B", "T", "H"))
    D = int(triton.next_power_of_2(int(case["D"])))
    threads = 32 * config.num_warps
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    tiles = 2 * held if config.num_stages > 1 else 1
    return Footprint(
        threads=threads,
        registers=triton.cdiv(config.block_m * (D + config.block_n), threads) + ADDRESS_REGISTERS,
        shared_bytes=(config.block_m + tiles * config.block_n) * D * scheme.activation.itemsize,
        ctas=triton.cdiv(T, config.block_m) * B * H,
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By the head and the size of a value: what an SM's registers and shared memory hold."""
    D = int(triton.next_power_of_2(int(case["D"])))
    if scheme.activation == torch.float32:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills.
        return Config(32, 32 if D <= 128 else 16, num_warps=4 if D <= 64 else 8, num_stages=1)
    return Config(128 if D <= 128 else 64, 64, num_warps=8 if D >= 128 else 4, num_stages=2)


@triton.jit
def _step(
    acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride, v_stride, scale_log2, cap, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """One tile of keys; with `MASKED` it may reach past what a row sees."""
    keys = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    keys64 = keys.to(tl.int64)
    real = dims < HEAD_DIM
    k_ptrs = k_base + keys64[None, :] * k_stride + dims[:, None]
    v_ptrs = v_base + keys64[:, None] * v_stride + dims[None, :]
    if MASKED:
        k = tl.load(k_ptrs, mask=(keys < S)[None, :] & real[:, None], other=0.0)
    elif BLOCK_D > HEAD_DIM:
        k = tl.load(k_ptrs, mask=real[:, None], other=0.0)
    else:
        k = tl.load(k_ptrs)
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    if CAP:
        scores = capped(scores, cap) * LOG2E  # scale_log2 is then the plain scale
    if MASKED:
        seen = (keys < S)[None, :]
        last = rows[:, None] + S - T
        if CAUSAL:
            seen = seen & (keys[None, :] <= last)
        if WINDOW:
            seen = seen & (keys[None, :] > last - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen no key yet has a peak of -inf; -inf - -inf would be NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    rescale = tl.exp2(peak - shift)
    total = total * rescale + tl.sum(weights, 1)
    if MASKED:
        # Masked as well as the scores: what lies past the end may be NaN, and 0 * NaN is NaN.
        v = tl.load(v_ptrs, mask=(keys < S)[:, None] & real[None, :], other=0.0)
    elif BLOCK_D > HEAD_DIM:
        v = tl.load(v_ptrs, mask=real[None, :], other=0.0)
    else:
        v = tl.load(v_ptrs)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit
def online_varlen_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, sinks_ptr, out_ptr, lse_ptr, tiles, sequences, H, group, scale_log2, cap,
    window, q_stride_t, q_stride_h, k_stride_s, k_stride_h, v_stride_s, v_stride_h, out_stride_t, out_stride_h,
    lse_stride_t, lse_stride_h,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOG2E: tl.constexpr,
    LN2: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    # Tiles of one number of all sequences and heads side by side, the last rows first.
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
    # int64: token and head offsets pass 2**31 elements in a long batch.
    tokens = (first_q + rows).to(tl.int64)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + tokens[:, None] * q_stride_t + h * q_stride_h + dims[None, :], mask=mask, other=0.0)
    k_base = k_ptr + first_k.to(tl.int64) * k_stride_s + h // group * k_stride_h
    v_base = v_ptr + first_k.to(tl.int64) * v_stride_s + h // group * v_stride_h
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    # Keys from `begin` to `end` are seen by some row, those from `full` to `whole` by all, in whole tiles.
    begin = 0
    full = 0
    end = S
    whole = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(S, first_row + BLOCK_M + S - T), 0)
        whole = tl.maximum(tl.minimum(whole, (first_row + 1 + S - T) // BLOCK_N * BLOCK_N), 0)
    if WINDOW:
        begin = tl.maximum(first_row + S - T + 1 - window, 0) // BLOCK_N * BLOCK_N
        full = tl.cdiv(tl.maximum(first_row + BLOCK_M + S - T - window, 0), BLOCK_N) * BLOCK_N
        full = tl.minimum(tl.maximum(full, begin), tl.cdiv(end, BLOCK_N) * BLOCK_N)
        whole = tl.maximum(whole, full)
        for start in range(begin, full, BLOCK_N):
            acc, peak, total = _step(
                acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, scale_log2, cap,
                window, CAUSAL, WINDOW, CAP, True, HEAD_DIM, BLOCK_D, BLOCK_N, LOG2E,
            )  # fmt: skip
    for start in range(full, whole, BLOCK_N):
        acc, peak, total = _step(
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, scale_log2, cap, window,
            CAUSAL, WINDOW, CAP, False, HEAD_DIM, BLOCK_D, BLOCK_N, LOG2E,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, peak, total = _step(
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, scale_log2, cap, window,
            CAUSAL, WINDOW, CAP, True, HEAD_DIM, BLOCK_D, BLOCK_N, LOG2E,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks_ptr + h) * LOG2E
        new_peak = tl.maximum(peak, sink)
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.exp2(sink - new_peak)
        acc = acc * rescale[:, None]
        peak = new_peak
    some = tl.where(total == 0.0, 1.0, total)
    result = (acc / some[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * out_stride_t + h * out_stride_h + dims[None, :], result, mask=mask)
    if LSE:
        lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(some)) * LN2)
        tl.store(lse_ptr + tokens * lse_stride_t + h * lse_stride_h, lse, mask=rows < T)


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if not 16 <= q.shape[-1] <= 256:
        return f"needs a head_dim of 16 to 256, got {q.shape[-1]}"
    return None


def traffic(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Traffic:
    """Each operand once, as L2 holds one sequence's keys while its tiles of queries read them."""
    lse = 4 * q.shape[0] * q.shape[1] if return_lse else 0
    return Traffic(nbytes(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks), nbytes(q) + lse)


@register(
    op="flash_attention_varlen",
    name="online",
    role="optimized",
    backend="triton",
    unsupported=unsupported,
    traffic=traffic,
    config_type=Config,
    configs=configs,
    is_legal=legal_by(footprint),
    heuristic=heuristic,
    footprint=footprint,
)
def flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
    out: Returned | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention of each sequence with an online softmax.  q: (T, H, D); k, v: (S, H_kv, D); returns (T, H, D).

    Any strides with a contiguous head. On a GPU the offsets are never read, so a row that no sequence has is left as
    it was. Raises `ValueError` on shapes, dtypes, options or a head_dim that do not fit.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, softcap, sinks)
    reason = unsupported(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if reason:
        raise ValueError(f"q: {reason}")
    result, lse = outputs(out, tuple(q.shape), q, return_lse)
    T, H, D = q.shape
    B = len(cu_seqlens_q) - 1
    if T and B and max_seqlen_q:
        config = config or default_config(
            "flash_attention_varlen", "online", q.dtype, q.device, B=B, T=max_seqlen_q, S=max_seqlen_k, H=H, D=D
        )
        tiles = triton.cdiv(max_seqlen_q, config.block_m)
        scale = get_scale(q, softmax_scale)
        # One grid axis: only x goes past 65,535 programs.
        online_varlen_kernel[(tiles * B * H,)](
            q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, result, lse, tiles, B, H, H // k.shape[1],
            scale if softcap is not None else scale * LOG2E,  # exp2 is the hardware's exponential
            softcap or 0.0, window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *result.stride()[:2],
            *((0, 0) if lse is None else lse.stride()),
            CAUSAL=causal, WINDOW=window is not None, CAP=softcap is not None, SINKS=sinks is not None,
            LSE=return_lse, HEAD_DIM=D, BLOCK_D=triton.next_power_of_2(D), BLOCK_M=config.block_m,
            BLOCK_N=config.block_n, LOG2E=LOG2E, LN2=LN2, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return result if lse is None else (result, lse)
