"""Over naive: one launch for all sequences, with an online softmax (Dao, "FlashAttention-2", 2023).

A program is a tile of queries of one sequence and head; if its tile is past the sequence's end, it exits at once.  The
tiles with the most keys come first: a causal sequence's last rows see all keys, and long tiles must not come at the end
(longest processing time first, Graham, 1969).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, key_tiles, softmax_numbers, step
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._tiles import Config, configs
from rooflab.kernels.flash_attention_varlen._args import check_args
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

ADDRESS_REGISTERS = 32
"""For pointers, masks and the running peak and sum, in addition to accumulator and scores."""


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """As flash_attention/online's: registers hold accumulator and scores, shared memory queries and staged keys and
    values.  Programs differ in their work, so `tensor_flops` is 0."""
    B, T, H = (int(case[key]) for key in ("B", "T", "H"))
    D = int(next_power_of_2(int(case["D"])))
    threads = 32 * config.num_warps
    warpgroup = config.block_m >= 64 and scheme.activation != torch.float32
    held = config.num_stages if warpgroup else config.num_stages - 1
    tiles = 2 * held if config.num_stages > 1 else 1
    return Footprint(
        threads=threads,
        registers=cdiv(config.block_m * (D + config.block_n), threads) + ADDRESS_REGISTERS,
        shared_bytes=(config.block_m + tiles * config.block_n) * D * scheme.activation.itemsize,
        ctas=cdiv(T, config.block_m) * B * H,
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim and bytes of a value: what an SM's registers and shared memory hold."""
    D = int(next_power_of_2(int(case["D"])))
    if scheme.activation == torch.float32:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills.
        return Config(32, 32 if D <= 128 else 16, num_warps=4 if D <= 64 else 8, num_stages=1)
    return Config(128 if D <= 128 else 64, 64, num_warps=8 if D >= 128 else 4, num_stages=2)


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
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    last_row = tl.minimum(first_row + BLOCK_M, T) - 1
    begin, full, whole, end = key_tiles(first_row, last_row, T, S, window, CAUSAL, WINDOW, BLOCK_N)
    if WINDOW:
        for start in range(begin, full, BLOCK_N):
            acc, peak, total = step(
                acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, window, scale, factor,
                cap, CAUSAL, WINDOW, CAP, NEGATED, True, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    for start in range(full, whole, BLOCK_N):
        acc, peak, total = step(
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, False, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, peak, total = step(
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, window, scale, factor, cap,
            CAUSAL, WINDOW, CAP, NEGATED, True, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    result, lse = finish(acc, peak, total, sinks_ptr, h * sinks_stride, SINKS)
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[:, None] * out_stride_t + h * out_stride_h + dims[None, :], result, mask=mask)
    if LSE:
        tl.store(lse_ptr + tokens * lse_stride_t + h * lse_stride_h, lse, mask=rows < T)


def why_not_taken(q: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if not 16 <= q.shape[-1] <= 256:
        return f"needs a head_dim of 16 to 256, got {q.shape[-1]}"
    return None


def traffic(inputs: Arguments) -> Traffic:
    """Each operand once, because L2 keeps a sequence's keys for its tiles of queries."""
    q = inputs.q
    lse = 4 * q.shape[0] * q.shape[1] if inputs.return_lse else 0
    return Traffic(
        nbytes(q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.sinks), nbytes(q) + lse
    )


@register(
    op="flash_attention_varlen", name="online", role="optimized", backend="triton",
    unsupported=lambda inputs: why_not_taken(inputs.q), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint), fenced_since="3.7",
)  # fmt: skip
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

    Any strides with contiguous heads.  Rows past the last offset are not allowed: the kernel does not write them, and
    on a GPU only `_checks.CHECK_VALUES` finds them.  Raises `ValueError` on wrong shapes, dtypes, options or head_dim.
    """
    check_args(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_options(q, causal, window, softcap, sinks)
    reason = why_not_taken(q)
    if reason:
        raise ValueError(f"q: {reason}")
    result, lse = outputs(out, tuple(q.shape), q, return_lse)
    T, H, D = q.shape
    B = len(cu_seqlens_q) - 1
    if T and B and max_seqlen_q:
        config = config or default_config(
            "flash_attention_varlen", "online", q.dtype, q.device, B=B, T=max_seqlen_q, S=max_seqlen_k, H=H, D=D
        )
        tiles = cdiv(max_seqlen_q, config.block_m)
        windowed = window is not None and window < max_seqlen_k  # a wider window hides nothing
        scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
        # One grid axis, because only x may exceed 65,535 programs.
        online_varlen_kernel[(tiles * B * H,)](
            q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, result, lse, tiles, B, H, H // k.shape[1],
            window if windowed else 0, scale, factor, cap, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            *result.stride()[:2], *((0, 0) if lse is None else lse.stride()), 0 if sinks is None else sinks.stride(0),
            CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
            LSE=return_lse, HEAD_DIM=D, BLOCK_D=next_power_of_2(D), **config.launch_arguments,
        )  # fmt: skip
    return result if lse is None else (result, lse)
