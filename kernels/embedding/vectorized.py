"""Implements `vectorized`, the version after `naive`: 16-byte loads per thread, several rows at once per program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.launcher import kernel
from rooflab.reference.embedding import SPEC

NUM_WARPS = 4
BLOCK_T = 4
# Eight elements for each of 128 threads and each of BLOCK_T rows: one 16-byte load in bf16, two in fp32.
MAX_BLOCK_H = 1024


@triton.jit
def _embedding(
    token_ids_ptr, weight_ptr, out_ptr, T, V, H, stride_weight, stride_out, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    # token_ids are int64, because token_id * stride passes 2**31 from V * H = 2**31 on.
    token_ids = tl.load(token_ids_ptr + tokens, mask=tokens < T, other=-1)
    id_mask = (token_ids >= 0) & (token_ids < V)
    column_mask = (columns < H)[None, :]
    weight_ptrs = weight_ptr + token_ids[:, None] * stride_weight + columns[None, :]
    weight_rows = tl.load(weight_ptrs, mask=id_mask[:, None] & column_mask, other=0.0)
    out_ptrs = out_ptr + tokens[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, weight_rows, mask=(tokens < T)[:, None] & column_mask)


@kernel(
    backend="triton",
    traffic=SPEC.least,
    over="naive",
    shows={
        "": (
            "below.LDG_E_U16 > 0 and below.STG_E_U16 > 0 and STG_E_128 == 4; LDG_E_U16 == STG_E_U16 == 0; "
            "bytes_in_flight >= 64 >= 8 * below.bytes_in_flight"
        )
    },
)
def vectorized(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes `weight[token_ids]`.  An id outside the table gives a row of zeros, because a kernel cannot raise."""
    T, (V, H) = len(token_ids), weight.shape
    block_h = min(next_power_of_2(H), MAX_BLOCK_H)
    _embedding[(cdiv(T, BLOCK_T), cdiv(H, block_h))](
        token_ids,
        weight,
        out,
        T,
        V,
        H,
        weight.stride(0),
        out.stride(0),
        BLOCK_T=BLOCK_T,
        BLOCK_H=block_h,
        num_warps=NUM_WARPS,
    )
