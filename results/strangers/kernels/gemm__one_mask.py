"""WRONG.  In the last step over K the kernel masks the columns of A that lie behind the end, but not the rows of B:
0 times anything is 0.  It is not if B is a slice of a larger buffer and behind its last row there is NaN or
infinity.  For a K that is a multiple of 32, and before finite memory, the kernel is right."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(
    a, b, bias, c, M, N, K, a_m, a_k, b_k, b_n, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        left_mask = (rows < M)[:, None] & (at < K)[None, :]
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, left_mask, 0.0)
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, (columns < N)[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows < M)[:, None] & (columns < N)[None, :])


@register(op="gemm", name="one_mask", role="optimized", backend="triton")
def gemm(a, b, bias=None):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        tile[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
            a,
            b,
            a if bias is None else bias,
            c,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            BIAS=bias is not None,
            BM=16,
            BN=32,
            BK=32,
        )
    return c
