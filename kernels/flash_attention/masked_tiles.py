"""Over online: masks only in the tiles that need one.

The diagonal, the far end of a window and the end of the keys cut a few of the key tiles that a tile of queries sees.
Those have their own loops.  The loop over the other tiles compares no position, selects no score and loads without a
predicate; a score costs one multiply-add and one exponential.  The options start here, because in online every tile
would pay for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, key_tiles, softmax_numbers, step
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._tiles import Config, configs, footprint, padded, traffic
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim and bytes of a value: what an SM's registers and shared memory hold."""
    width = padded(int(case["D"]))
    if scheme.activation == torch.float32:
        # fp32 products are FMAs, whose operands fill the registers: a wider tile spills (read in the SASS).
        return Config(32, 32 if width <= 128 else 16, num_warps=4 if width <= 64 else 8, num_stages=1)
    return Config(128 if width <= 128 else 64, 64, num_warps=8 if width >= 128 else 4, num_stages=2)


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, T, S, H, group, window, scale, factor, cap,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context.
    tiles = tl.cdiv(T, BLOCK_M)
    b = (tl.program_id(0) // tiles // H).to(tl.int64)
    h = (tl.program_id(0) // tiles % H).to(tl.int64)
    first_row = tl.program_id(0) % tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows64 = rows.to(tl.int64)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = b * q_stride_b + h * q_stride_h + rows64[:, None] * q_stride_t + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    k_base = k_ptr + b * k_stride_b + (h // group) * k_stride_h
    v_base = v_ptr + b * v_stride_b + (h // group) * v_stride_h
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
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, window, scale, factor,
            cap, CAUSAL, WINDOW, CAP, NEGATED, False, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        acc, peak, total = step(
            acc, peak, total, q, k_base, v_base, start, rows, S, T, k_stride_s, v_stride_s, window, scale, factor,
            cap, CAUSAL, WINDOW, CAP, NEGATED, True, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
    result, lse = finish(acc, peak, total, sinks_ptr, h * sinks_stride, SINKS)
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


def why_not_taken(q: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None."""
    if not 16 <= q.shape[-1] <= 256:
        return f"q: expected a head_dim of 16 to 256, got {q.shape[-1]}; flash_attention/naive takes any"
    return None


@register(
    op="flash_attention", name="masked_tiles", role="optimized", backend="triton",
    unsupported=lambda inputs: why_not_taken(inputs.q), traffic=traffic,
    tuning=Tuning(Config, configs, heuristic, footprint), fenced_since="3.7",
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
    """Attention with masks only where needed.  q: (B, T, H, D); k, v: (B, S, H_kv, D); fp32, fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Any strides with contiguous heads.
    Raises `ValueError` on wrong shapes, dtypes, options or head_dim.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    reason = why_not_taken(q)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    B, T, H, D = q.shape
    if out.numel():
        config = config or default_config("flash_attention", "masked_tiles", q.dtype, q.device, B=B, T=T, H=H, D=D)
        windowed = window is not None and window < k.shape[1]  # a wider window hides nothing
        scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
        # One grid axis, because only x may exceed 65,535 programs.
        _attention[(cdiv(T, config.block_m) * B * H,)](
            q, k, v, sinks, out, lse, T, k.shape[1], H, H // k.shape[2], window if windowed else 0, scale, factor, cap,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *((0, 0, 0) if lse is None else lse.stride()), 0 if sinks is None else sinks.stride(0),
            CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
            LSE=return_lse, HEAD_DIM=D, BLOCK_D=padded(D), **config.launch_arguments,
        )  # fmt: skip
    return out if lse is None else (out, lse)
