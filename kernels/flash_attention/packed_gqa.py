"""Over tma: the query heads that share a head of keys share a tile's rows.

A tile of tma has rows of one head, so a short query (a chunk of a prefill, or a few guessed tokens) leaves most rows
empty, and each head of a group loads the same keys again.  Here row r is position r // group and head r % group: T = 16
queries of a group of 4 fill 64 rows, and the group loads a tile of keys once.  A tile also covers fewer positions, so a
causal mask cuts less of it.  Pointers load q and store the result, by rows of a head, because a group is no box of a
tensor map.  There are fewer tiles than in tma, and keys are not split, so fewer SMs may be busy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, softmax_numbers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._maps import nothing_seen, tensor_map, why_keys_not_loaded
from rooflab.kernels.flash_attention._tiles import Config, padded, tma_choice, tma_configs, tma_footprint, traffic
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles for wgmma, with pipelines of several depths."""
    return tma_configs(case)


def _rows(case: Case) -> tuple[int, int]:
    """Rows per head of keys, and the number of such heads; without `H_kv` no heads share keys."""
    H = int(case["H"])
    H_kv = int(case.get("H_kv", H))
    return int(case["T"]) * (H // H_kv), H_kv


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One CTA per tile and head of keys."""
    rows, H_kv = _rows(case)
    return tma_footprint(config, case, ctas=cdiv(rows, config.block_m) * H_kv)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """64 rows if they are enough, else what an SM's registers and shared memory hold."""
    chosen = tma_choice(int(case["D"]))
    return replace(chosen, block_m=64, num_warps=4) if _rows(case)[0] <= 64 else chosen


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
    acc, peak, total = attend(
        q, k_map, v_map, b, h_kv, rows, first_row // group, last_row // group, S, T, window, scale, factor, cap,
        CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    result, lse = finish(acc, peak, total, sinks_ptr, heads * sinks_stride, SINKS)
    out_offsets = b64 * out_stride_b + (rows64 * out_stride_t + heads * out_stride_h)[:, None] + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b64 * lse_stride_b + heads * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


@register(
    op="flash_attention", name="packed_gqa", role="optimized", backend="triton", min_sm=90,
    unsupported=lambda inputs: why_keys_not_loaded(inputs.q, inputs.k, inputs.v), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    """Attention of a group's heads in one tile.  q: (B, T, H, D); k, v: (B, S, H_kv, D), fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of k and v are
    whole 16 bytes, D is a multiple of 8.  Raises `ValueError` on wrong shapes, dtypes, options or strides.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    reason = why_keys_not_loaded(q, k, v)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    B, T, H, D = q.shape
    S, H_kv = k.shape[1:3]
    if not out.numel() or S == 0:
        return nothing_seen(out, lse, sinks)
    config = config or default_config("flash_attention", "packed_gqa", q.dtype, q.device, B=B, T=T, H=H, H_kv=H_kv, D=D)
    windowed = window is not None and window < S  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
    # One grid axis, because only x may exceed 65,535 programs.
    _attention[(cdiv(T * (H // H_kv), config.block_m) * B * H_kv,)](
        q, tensor_map(k, config.block_n), tensor_map(v, config.block_n), sinks, out, lse, T, S, H_kv, H // H_kv,
        window if windowed else 0, scale, factor, cap, *q.stride()[:3], *out.stride()[:3],
        *((0, 0, 0) if lse is None else lse.stride()), 0 if sinks is None else sinks.stride(0),
        CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
        LSE=return_lse, HEAD_DIM=D, BLOCK_D=padded(D), **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)
