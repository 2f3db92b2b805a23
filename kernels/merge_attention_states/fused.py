"""The kernel `fused` improves on `naive`: it makes one pass over all parts, with a running maximum of the log-sum-exps
(Milakov and Gimelshein, 2018).  mla_decode/split_kv ends with the same launch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._attention import LN2, LOG2E
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic

WARPS = 4
VECTOR_BYTES = 16
"""The bytes that a lane loads at once.  A program's lanes load its rows (tokens and heads) with one load each."""
PARTS_PER_ROUND = 4
"""The number of parts that a step loads together, because each single load would wait for the load before it."""


# These arguments change with the batch; if Triton specialized them, a new remainder modulo 16 would compile again.
@triton.jit(do_not_specialize=["parts", "T", "lses_stride_p"])
def fused_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, parts, T, H, D, outs_stride_p, outs_stride_t, outs_stride_h,
    lses_stride_p, lses_stride_t, lses_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h,
    TO_LOG2: tl.constexpr, TO_LN: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    # row is int64, because parts * rows * D passes 2**31 elements.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = row < T * H
    t = row // H
    h = row % H
    dim_ids = tl.arange(0, BLOCK_D)
    value_mask = row_mask[:, None] & (dim_ids < D)[None, :]
    lses_ptrs = lses_ptr + t * lses_stride_t + h * lses_stride_h
    outs_ptrs = outs_ptr + (t * outs_stride_t + h * outs_stride_h)[:, None] + dim_ids[None, :]
    m_i = tl.full((ROWS,), float("-inf"), tl.float32)
    l_i = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for first_part in range(0, parts, AT_ONCE):
        part_index = first_part + tl.arange(0, AT_ONCE)
        part_index64 = part_index.to(tl.int64)
        has_part = row_mask[:, None] & (part_index < parts)[None, :]
        lse = tl.load(lses_ptrs[:, None] + part_index64[None, :] * lses_stride_p, mask=has_part, other=float("-inf"))
        lse = tl.where(lse == float("inf"), float("-inf"), lse)  # as some libraries write of a part that saw no key
        has_keys = lse > float("-inf")
        # No load where the part saw no key: its output is undefined there, and 0 * NaN is NaN.
        part_ptrs = outs_ptrs[:, None, :] + (part_index64 * outs_stride_p)[None, :, None]
        part_values = tl.load(part_ptrs, mask=value_mask[:, None, :] & has_keys[:, :, None], other=0.0).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(lse, 1))
        exponent_shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        acc_scale = tl.exp2((m_i - exponent_shift) * TO_LOG2)
        weight = tl.exp2((lse - exponent_shift[:, None]) * TO_LOG2)
        l_i = l_i * acc_scale + tl.sum(weight, 1)
        acc = acc * acc_scale[:, None] + tl.sum(weight[:, :, None] * part_values, 1)
        m_i = m_new
    divisor = tl.where(l_i == 0.0, 1.0, l_i)
    result = (acc * (1 / divisor)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (t * out_stride_t + h * out_stride_h)[:, None] + dim_ids[None, :], result, mask=value_mask)
    lse = tl.where(l_i == 0.0, float("-inf"), m_i + tl.log2(divisor) * TO_LN)
    tl.store(lse_ptr + t * lse_stride_t + h * lse_stride_h, lse, mask=row_mask)


def launch(outs: Tensor, lses: Tensor, merged: Tensor, lse: Tensor) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Computes the number of programs, the sizes and strides, and the constants.  `outs` has P parts, (P, T, H, D)."""
    part_count, T, H, D = outs.shape
    block_d = int(next_power_of_2(D))
    rows = max(32 * WARPS * VECTOR_BYTES // outs.element_size() // block_d, 1)
    strides = (*outs.stride()[:3], *lses.stride(), *merged.stride()[:2], *lse.stride())
    constant_args = {
        "TO_LOG2": LOG2E,
        "TO_LN": LN2,
        "BLOCK_D": block_d,
        "ROWS": rows,
        "AT_ONCE": PARTS_PER_ROUND,
        "num_warps": WARPS,
        # In a fused multiply-add a lane's own product is exact and others' are rounded: equal sums would then differ.
        "enable_fp_fusion": False,
    }
    return cdiv(T * H, rows), (part_count, T, H, D, *strides), constant_args


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of one read of every part, and of the write of the result."""
    outs, lses = inputs.outs, inputs.lses
    return Traffic(nbytes(outs, lses), nbytes(outs, lses) // outs.shape[0])


def without_values(of: Arguments) -> None:
    """Writes only the log-sum-exps, for heads of size 0, which have no values."""
    of.lse.copy_(torch.logsumexp(of.lses.masked_fill(of.lses == math.inf, -math.inf), dim=0))


@kernel(
    backend="triton",
    traffic=traffic,
    empty=without_values,
    bind=lambda of: launch(of.outs, of.lses, of.out, of.lse),
    over="naive",
    shows={"": ('calls("naive").total >= 8 and launched == 1; loop.LDG_E_128 == 4 and loop.global_store == 0')},
)
def fused(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, bound: Any) -> None:
    """Merges the attention results of all parts in one pass, four parts at once."""
    program_count, scalar_args, constant_args = bound
    fused_kernel[(program_count,)](outs, lses, out, lse, *scalar_args, **constant_args)
