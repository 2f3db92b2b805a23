"""WRONG.  Tiles are done in groups of four rows of tiles, for the L2 cache.  The last group may have fewer rows,
but the kernel computes its tiles as if it had four: some tiles lie behind the last row, and as many real ones are
never written.  Up to 64 rows, and for multiples of 64, each group is whole."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(
    a, b, bias, c, M, N, K, a_m, a_k, b_k, b_n, wide, group,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    first = pid // (group * wide) * group
    row_tile = first + pid % group
    column_tile = pid % (group * wide) // group
    rows = (row_tile * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (column_tile * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < K)[None, :], 0.0)
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, (at < K)[:, None] & (columns < N)[None, :], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows < M)[:, None] & (columns < N)[None, :])


@register(op="gemm", name="short_last_group", role="optimized", backend="triton")
def gemm(a, b, bias=None):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        high, wide = triton.cdiv(M, 16), triton.cdiv(N, 32)
        tile[(high * wide,)](
            a, b, a if bias is None else bias, c, M, N, K, *a.stride(), *b.stride(), wide, min(high, 4), BIAS=bias is
            not None, BM=16, BN=32, BK=32,
        )  # fmt: skip
    return c
