"""Implements the kernel `naive`: one Triton program per tile of the result, one k at a time, without tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._sizes import cdiv
from rooflab.kernels.gemm._operands import panels_traffic
from rooflab.kernels.launcher import kernel

BLOCK_M = 16
BLOCK_N = 64


@triton.jit
def _gemm(
    a_ptr, b_ptr, bias_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_om,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    # int64, because row * stride passes 2**31 from M * K = 2**31 on.
    rows = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + rows * stride_am
    b_ptrs = b_ptr + columns * stride_bn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(K):
        a = tl.load(a_ptrs, mask=rows < M, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs, mask=columns < N, other=0.0).to(tl.float32)
        accumulator += a[:, None] * b[None, :]
        a_ptrs += stride_ak
        b_ptrs += stride_bk
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_mask = (rows < M)[:, None] & (columns < N)[None, :]
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :]
    tl.store(out_ptrs, accumulator.to(out_ptr.dtype.element_ty), mask=out_mask)


@kernel(backend="triton", traffic=lambda inputs: panels_traffic(inputs, BLOCK_M))
def naive(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor) -> None:
    """Computes `a @ b + bias` by outer products, accumulated in fp32."""
    (M, K), N = a.shape, b.shape[1]
    _gemm[(cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),)](
        a,
        b,
        bias,
        c,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        c.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
    )
