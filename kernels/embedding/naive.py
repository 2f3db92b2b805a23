"""One Triton program per token; each thread moves one element at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import output
from rooflab.kernels.embedding._operands import check_operands, traffic
from rooflab.kernels.registry import register

NUM_WARPS = 4
# One element per thread: loads of 2 or 4 bytes instead of the 16 that a thread could load.
BLOCK_H = 32 * NUM_WARPS


@triton.jit
def _embedding(token_ids_ptr, weight_ptr, out_ptr, V, H, stride_weight, stride_out, BLOCK_H: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    # token_id is int64, because token_id * stride passes 2**31 from V * H = 2**31 on.
    token_id = tl.load(token_ids_ptr + token)
    known = (token_id >= 0) & (token_id < V)
    for start in range(0, H, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        row = tl.load(weight_ptr + token_id * stride_weight + columns, mask=known & (columns < H), other=0.0)
        tl.store(out_ptr + token * stride_out + columns, row, mask=columns < H)


@register(op="embedding", name="naive", role="naive", backend="triton", traffic=traffic)
def embedding(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight[token_ids], a row per program.

    token_ids: (T,) int64 contiguous; weight: (V, H); returns (T, H).  An id outside the table gives a row of zeros,
    because a kernel cannot raise.  Raises `ValueError` on wrong shapes or dtypes.
    """
    T, V, H = check_operands(token_ids, weight)
    out = output(out, (T, H), weight)
    if out.numel():
        _embedding[(T,)](
            token_ids, weight, out, V, H, weight.stride(0), out.stride(0), BLOCK_H=BLOCK_H, num_warps=NUM_WARPS
        )
    return out
