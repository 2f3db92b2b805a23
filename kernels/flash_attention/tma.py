"""Over masked_tiles: the tensor memory accelerator (TMA) loads the tiles of q, k and v.

One thread issues the load of a tile; with cp.async every thread needs an address, a mask and an instruction for each 16
bytes, that is registers and issue slots that the exponentials need.  A map ends with its sequence and its head, and TMA
gives zeros beyond, so neither a short last tile nor a padded head needs a mask.  A map costs the host a driver call per
launch, and needs addresses and strides of whole 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, softmax_numbers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention._args import check_args
from rooflab.kernels.flash_attention._maps import nothing_seen, tensor_map, why_not_loaded
from rooflab.kernels.flash_attention._tiles import Config, padded, tma_choice, tma_configs, tma_footprint, traffic
from rooflab.kernels.flash_attention._timeline import TIMELINE, keep
from rooflab.kernels.flash_attention._tma_device import attend
from rooflab.kernels.registry import register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.spec import Case, Scheme


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Tiles for wgmma, with pipelines of several depths."""
    return tma_configs(case)


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """One CTA per tile and head of queries."""
    return tma_footprint(config, case, ctas=cdiv(int(case["T"]), config.block_m) * int(case["H"]))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """By head_dim: what an SM's registers and shared memory hold."""
    return tma_choice(int(case["D"]))


@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, out_ptr, lse_ptr, timeline_ptr, T, S, H, group, window, scale, factor, cap,
    out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    if timeline_ptr is not None:
        began = globaltimer()
    tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    first_row = tl.program_id(0) % tiles * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    acc, peak, total = attend(
        q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window, scale,
        factor, cap, CAUSAL, WINDOW, CAP, NEGATED, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context; the maps use 64 bits anyway.
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    result, lse = finish(acc, peak, total, sinks_ptr, h * sinks_stride, SINKS)
    rows64 = rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)
    if timeline_ptr is not None:
        keep(timeline_ptr, tl.program_id(0), began)


@register(
    op="flash_attention", name="tma", role="optimized", backend="triton", min_sm=90,
    unsupported=lambda inputs: why_not_loaded(inputs.q, inputs.k, inputs.v), traffic=traffic,
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
    """Attention on tiles that TMA loads.  q: (B, T, H, D); k, v: (B, S, H_kv, D), fp16 or bf16.

    Returns (B, T, H, D), and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of q, k and v are
    whole 16 bytes, D is a multiple of 8.  Raises `ValueError` on wrong shapes, dtypes, options or strides.
    """
    check_args(q, k, v)
    check_options(q, causal, window, softcap, sinks)
    reason = why_not_loaded(q, k, v)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse)
    B, T, H, D = q.shape
    S = k.shape[1]
    if not out.numel() or S == 0:
        return nothing_seen(out, lse, sinks)
    config = config or default_config("flash_attention", "tma", q.dtype, q.device, B=B, T=T, H=H, D=D)
    windowed = window is not None and window < S  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
    # One grid axis, because only x may exceed 65,535 programs.
    _attention[(cdiv(T, config.block_m) * B * H,)](
        tensor_map(q, config.block_m), tensor_map(k, config.block_n), tensor_map(v, config.block_n), sinks, out, lse,
        TIMELINE.get(), T, S, H, H // k.shape[2], window if windowed else 0, scale, factor, cap, *out.stride()[:3],
        *((0, 0, 0) if lse is None else lse.stride()), 0 if sinks is None else sinks.stride(0),
        CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
        LSE=return_lse, HEAD_DIM=D, BLOCK_D=padded(D), **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)
