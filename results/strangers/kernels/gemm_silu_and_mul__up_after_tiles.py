"""WRONG.  The columns of up are taken to begin behind gate's last tile of 32 columns, at cdiv(I, 32) * 32, and not
at I.  For the widths of usual models these are the same.  With I = 24 or 72 (a small model, or a shard) up is
shifted."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def tile(a, b, out, M, I, K, up_at, a_m, a_k, b_k, b_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    ups = columns + up_at
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)
        inside = (at < K)[:, None]
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < K)[None, :], 0.0)
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, inside & (columns < I)[None, :], 0.0)
        other = tl.load(b + at[:, None] * b_k + ups[None, :] * b_n, inside & (ups < 2 * I)[None, :], 0.0)
        gate = tl.dot(left, right, gate, input_precision="ieee")
        up = tl.dot(left, other, up, input_precision="ieee")
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows[:, None] * I + columns[None, :], result, (rows < M)[:, None] & (columns < I)[None, :])


@register(op="gemm_silu_and_mul", name="up_after_tiles", role="optimized", backend="triton")
def gemm_silu_and_mul(a, b):
    (M, K), I = a.shape, b.shape[1] // 2
    out = torch.empty((M, I), dtype=a.dtype, device=a.device)
    if M and I:
        tiles = triton.cdiv(I, 32)
        tile[(triton.cdiv(M, 16), tiles)](a, b, out, M, I, K, tiles * 32, *a.stride(), *b.stride(), BM=16, BN=32, BK=32)
    return out
