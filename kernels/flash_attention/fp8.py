"""Over tma: queries, keys and values in e4m3 with one scale per head, on the fp8 tensor cores.

The scales of q and k go into the factor of the exponent, once per tile; the scale of v goes into the result.  Weights
are e4m3 between 2**-9 and 2**8: their exponents are shifted by 8, and the sum that divides them is too.  fp32 registers
add each tile's product with the values, because the fp8 accumulator keeps 14 bits (see gemm_fp8/promoted.py).

Tried, predicted, not built: docs/notes/flash_attention.md.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from rooflab.kernels._attention import Returned, outputs
from rooflab.kernels._attention_device import finish, softmax_numbers
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.configs import default_config
from rooflab.kernels.flash_attention import _tiles
from rooflab.kernels.flash_attention._args import check_args, keys_contiguous
from rooflab.kernels.flash_attention._fp8_device import SMALLEST_FACTOR, UNIT, attend, scale_of
from rooflab.kernels.flash_attention._maps import columns_map, nothing_seen, tensor_map, why_not_loaded_in_fp8
from rooflab.kernels.flash_attention._tiles import ADDRESS_REGISTERS, Config, padded
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.attention import check_options
from rooflab.reference.flash_attention import check_scales
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

WIDEST = 128
"""Widest head_dim for which a tile's products and the sums fit in registers together (read in the SASS)."""


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """One warpgroup per 64 rows, or per 128 of a narrow head, pipelines of several depths; for a wide head 64 keys,
    because more keys spill (read in the SASS)."""
    width = padded(int(case["D"]))
    tiles = [(64, 4), (128, 8), *([(128, 4)] if width <= 64 else [])]
    keys = (64, 128, 256) if width <= WIDEST else (64,)
    return tuple(Config(m, n, warps, stages) for m, warps in tiles for n in keys for stages in (2, 3, 4))


def values_in_fp8(columns: bool, head_dim: int) -> bool:
    """Whether weights and values are multiplied in e4m3, not in fp16."""
    return columns and padded(head_dim) <= WIDEST


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers: the sums, and a tile's products or scores, or scores and their weights in fp16.

    Shared memory: the queries and every stage of keys and values; fp16 values need one more tile, twice as wide.
    """
    D = padded(int(case["D"]))
    in_fp8 = values_in_fp8(bool(case.get("v_columns")), D)
    columns = D + (max(D, config.block_n) if in_fp8 else config.block_n + config.block_n // 2)
    rows = config.block_m + (2 * config.num_stages + (not in_fp8)) * config.block_n
    return Footprint(
        threads=32 * config.num_warps,
        registers=config.block_m * columns // (32 * config.num_warps) + ADDRESS_REGISTERS,
        shared_bytes=rows * D,
        ctas=cdiv(int(case["T"]), config.block_m) * int(case["H"]) * int(case["B"]),
    )


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """One warpgroup of 64 rows: two or three CTAs fit on an SM, and the exponentials of one run under the products of
    another.  128 rows in two warpgroups would read half the bytes from L2, but only one CTA would fit, whose steps wait
    for each other.
    """
    return Config(64, 128 if padded(int(case["D"])) <= WIDEST else 64, num_warps=4, num_stages=2)


# Arguments that change from call to call are not specialized: a 1 or a multiple of 16 would compile again.
@triton.jit(do_not_specialize=["T", "S", "window", "lse_stride_b"])
def _attention(
    q_map, k_map, v_map, sinks_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr, T, S, H, group, window,
    scale, factor, cap, q_scale_stride_b, q_scale_stride_h, k_scale_stride_b, k_scale_stride_h, v_scale_stride_b,
    v_scale_stride_h, out_stride_b, out_stride_t, out_stride_h, lse_stride_b, lse_stride_t, lse_stride_h, sinks_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, NEGATED: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr, V_COLUMNS: tl.constexpr, V_FP8: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BLOCK_M)
    b = tl.program_id(0) // tiles // H
    h = tl.program_id(0) // tiles % H
    # A head's last rows first: under a causal mask they take longest, and the grid should end with short tiles.
    first_row = (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    products = scale_of(q_scale_ptr, b, h, q_scale_stride_b, q_scale_stride_h) * scale_of(
        k_scale_ptr, b, h // group, k_scale_stride_b, k_scale_stride_h
    )
    if CAP:
        scale *= products
    else:
        factor = tl.maximum(factor * products, SMALLEST_FACTOR)
    q = q_map.load([b, h, first_row, 0]).reshape(BLOCK_M, BLOCK_D)
    acc, peak, total = attend(
        q, k_map, v_map, b, h // group, rows, first_row, tl.minimum(first_row + BLOCK_M, T) - 1, S, T, window, scale,
        factor, cap, CAUSAL, WINDOW, CAP, NEGATED, V_COLUMNS, V_FP8, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    v_scale = scale_of(v_scale_ptr, b, h // group, v_scale_stride_b, v_scale_stride_h)
    # int64, because offsets of batch, row and head pass 2**31 elements in a long context; the maps use 64 bits anyway.
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    result, lse = finish(acc * (v_scale * UNIT), peak, total * UNIT, sinks_ptr, h * sinks_stride, SINKS)
    rows64 = rows.to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = b * out_stride_b + h * out_stride_h + rows64[:, None] * out_stride_t + dims[None, :]
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
    if LSE:
        lse_offsets = b * lse_stride_b + h * lse_stride_h + rows64 * lse_stride_t
        tl.store(lse_ptr + lse_offsets, lse, mask=rows < T)


def traffic(inputs: Arguments) -> Traffic:
    """As in the other kernels, with a bf16 result and the scales."""
    moved, scales = _tiles.traffic(inputs), nbytes(inputs.q_scale, inputs.k_scale, inputs.v_scale)
    return Traffic(moved.read_bytes + scales, moved.write_bytes + nbytes(inputs.q))


@register(
    op="flash_attention", name="fp8", role="optimized", backend="triton", min_sm=90,
    unsupported=lambda inputs: why_not_loaded_in_fp8(inputs.q, inputs.k, inputs.v), traffic=traffic,
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
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    config: Config | None = None,
) -> Returned:
    """Attention in e4m3.  q: (B, T, H, D); k, v: (B, S, H_kv, D); q_scale: (B, H), k_scale, v_scale: (B, H_kv) fp32,
    positive, any strides, None for 1.

    Returns (B, T, H, D) bf16, and with `return_lse` the log-sum-exp (B, T, H) fp32.  Addresses and strides of q, k and
    v are whole 16 bytes, D is a multiple of 16; v is contiguous along head_dim or, faster, along its keys.  Raises
    `ValueError` on wrong shapes, dtypes, options or strides.
    """
    check_args(q, k, v, fp8=True)
    check_options(q, causal, window, softcap, sinks)
    check_scales(q, k, q_scale, k_scale, v_scale)
    reason = why_not_loaded_in_fp8(q, k, v)
    if reason:
        raise ValueError(reason)
    out, lse = outputs(out, tuple(q.shape), q, return_lse, torch.bfloat16)
    B, T, H, D = q.shape
    S = k.shape[1]
    if not out.numel() or S == 0:
        return nothing_seen(out, lse, sinks)
    columns = keys_contiguous(v)
    dims = {"B": B, "T": T, "H": H, "D": D, "v_columns": columns}
    config = config or default_config("flash_attention", "fp8", "fp8_e4m3", q.device, **dims)
    windowed = window is not None and window < S  # a wider window hides nothing
    scale, factor, cap, negated = softmax_numbers(q, softmax_scale, softcap)
    v_map = (columns_map if columns else tensor_map)(v, config.block_n)
    # One grid axis, because only x may exceed 65,535 programs.
    _attention[(cdiv(T, config.block_m) * B * H,)](
        tensor_map(q, config.block_m), tensor_map(k, config.block_n), v_map, sinks, q_scale, k_scale, v_scale, out, lse,
        T, S, H, H // k.shape[2], window if windowed else 0, scale, factor, cap,
        *itertools.chain.from_iterable((0, 0) if x is None else x.stride() for x in (q_scale, k_scale, v_scale)),
        *out.stride()[:3], *((0, 0, 0) if lse is None else lse.stride()), 0 if sinks is None else sinks.stride(0),
        CAUSAL=causal, WINDOW=windowed, CAP=softcap is not None, NEGATED=negated, SINKS=sinks is not None,
        LSE=return_lse, V_COLUMNS=columns, HEAD_DIM=D, V_FP8=values_in_fp8(columns, D), BLOCK_D=padded(D),
        **config.launch_arguments,
    )  # fmt: skip
    return out if lse is None else (out, lse)
