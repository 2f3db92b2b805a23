"""WRONG.  The size of a group is taken as K // G, the number of values over the number of scales.  If the last
group is short, that is not the group: with K = 160 and groups of 128 there are two scales, and the kernel changes
the scale at k = 80."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(
    a, b, scale, zero, bias, c, M, N, K, group, a_m, a_k, b_n, b_k, s_n, s_g, z_n, z_g,
    ZERO: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        mask = (at < K)[:, None] & (columns < N)[None, :]
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < K)[None, :], 0.0)
        packed = tl.load(b + columns[None, :] * b_n + (at // 2)[:, None] * b_k, mask, 0).to(tl.int32)
        code = (packed >> (at % 2 * 4)[:, None]) & 15
        size = tl.load(scale + columns[None, :] * s_n + (at // group)[:, None] * s_g, mask, 0.0).to(tl.float32)
        if ZERO:
            code -= tl.load(zero + columns[None, :] * z_n + (at // group)[:, None] * z_g, mask, 0).to(tl.int32)
        else:
            code -= 8
        weight = tl.where(mask, code.to(tl.float32) * size, 0.0)
        total = tl.dot(left.to(tl.float32), weight, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    tl.store(c + rows[:, None] * N + columns[None, :], total, (rows < M)[:, None] & (columns < N)[None, :])


@register(op="gemm_w4a16", name="group_by_division", role="optimized", backend="triton")
def gemm_w4a16(a, b, scale, zero=None, bias=None):
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    zeros = (0, 0) if zero is None else zero.stride()
    if M and N:
        tile[(triton.cdiv(M, 16), triton.cdiv(N, 32))](
            a, b, scale, b if zero is None else zero, a if bias is None else bias, c, M, N, K, K // scale.shape[1],
            *a.stride(), *b.stride(), *scale.stride(), *zeros, ZERO=zero is not None, BIAS=bias is not None, BM=16,
            BN=32, BK=32,
        )  # fmt: skip
    return c
