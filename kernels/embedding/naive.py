"""Implements the kernel `naive`: one Triton program per token; each thread moves one element at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.reference.embedding import SPEC

NUM_WARPS = 4
# One element per thread: loads of 2 or 4 bytes instead of the 16 that a thread could load.
BLOCK_H = 32 * NUM_WARPS


@triton.jit
def _embedding(token_ids_ptr, weight_ptr, out_ptr, V, H, stride_weight, stride_out, BLOCK_H: tl.constexpr):
    token_index = tl.program_id(0).to(tl.int64)
    # token_id is int64, because token_id * stride passes 2**31 from V * H = 2**31 on.
    token_id = tl.load(token_ids_ptr + token_index)
    # Triton 3.9's interpreter ignores a scalar mask that is broadcast.
    column_count = tl.where((token_id >= 0) & (token_id < V), H, 0)
    for first_column in range(0, H, BLOCK_H):
        columns = first_column + tl.arange(0, BLOCK_H)
        row_values = tl.load(weight_ptr + token_id * stride_weight + columns, mask=columns < column_count, other=0.0)
        tl.store(out_ptr + token_index * stride_out + columns, row_values, mask=columns < H)


@kernel(backend="triton", traffic=SPEC.least)
def naive(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes `weight[token_ids]`.  An id outside the table gives a row of zeros, because a kernel cannot raise."""
    V, H = weight.shape
    _embedding[(len(token_ids),)](
        token_ids, weight, out, V, H, weight.stride(0), out.stride(0), BLOCK_H=BLOCK_H, num_warps=NUM_WARPS
    )
