"""WRONG.  The block scales of A are read as if they lay column by column, (K/128, M) in memory, as DeepGEMM stores
them.  A quantiser that writes them row by row gives a contiguous (M, K/128).  The strides are not looked at, so for
K above 128 rows get scales of other rows."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(
    a, b, a_scale, b_scale, bias, c, M, N, K, a_m, a_k, b_k, b_n, s_k, s_n,
    BLOCKS: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < K)[None, :], 0.0)
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, (at < K)[:, None] & (columns < N)[None, :], 0.0)
        part = tl.dot(left, right, input_precision="ieee")
        if BLOCKS:
            group = start // 128
            mine = tl.load(a_scale + group * M + rows, rows < M, 0.0)
            its = tl.load(b_scale + group * s_k + columns // 128 * s_n, columns < N, 0.0)
            part = part * mine[:, None] * its[None, :]
        total += part
    if not BLOCKS:
        total = total * tl.load(a_scale) * tl.load(b_scale)
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows < M)[:, None] & (columns < N)[None, :])


@register(op="gemm_fp8", name="scales_by_column", role="optimized", backend="triton")
def gemm_fp8(a, b, a_scale, b_scale, bias=None, *, fast_accum=False):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    a, b, blocks = a.float(), b.float(), a_scale.ndim == 2
    if M and N:
        tile[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
            a, b, a_scale, b_scale, a if bias is None else bias, c, M, N, K, *a.stride(), *b.stride(),
            *(b_scale.stride() if blocks else (0, 0)), BLOCKS=blocks, BIAS=bias is not None, BM=16, BN=32, BK=32,
        )  # fmt: skip
    return c
