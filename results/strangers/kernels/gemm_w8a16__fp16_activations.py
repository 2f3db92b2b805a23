"""WRONG.  The activations are converted from bf16 to fp16 for the product, because fp16 has more bits.  Its range
ends at 65504: an activation of 100,000, which bf16 holds and massive activations reach, becomes infinite."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(
    a, b, scale, bias, c, M, N, K, a_m, a_k, b_k, b_n, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < K)[None, :], 0.0)
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, (at < K)[:, None] & (columns < N)[None, :], 0)
        total = tl.dot(left.to(tl.float16), right.to(tl.float16), total)
    total = total * tl.load(scale + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows < M)[:, None] & (columns < N)[None, :])


@register(op="gemm_w8a16", name="fp16_activations", role="optimized", backend="triton")
def gemm_w8a16(a, b, scale, bias=None):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    if M and N:
        tile[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
            a,
            b,
            scale,
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
