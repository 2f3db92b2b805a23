"""RIGHT.  K is cut into three uneven parts, and each part of each tile has a program, which writes its sums in fp32
to scratch memory, columns before rows.  A second launch adds the three parts in a fixed order, then bias and
residual."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def part_of_tile(
    a, b, scratch, M, N, K, a_m, a_k, b_k, b_n, cut, other, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    part = tl.program_id(2)
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    first = tl.where(part == 0, 0, tl.where(part == 1, cut, other))
    end = tl.where(part == 0, cut, tl.where(part == 1, other, K))
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(first, end, BK):
        at = (start + tl.arange(0, BK)).to(tl.int64)
        left = tl.load(a + rows[:, None] * a_m + at[None, :] * a_k, (rows < M)[:, None] & (at < end)[None, :], 0.0)
        mask = (at < end)[:, None] & (columns < N)[None, :]
        right = tl.load(b + at[:, None] * b_k + columns[None, :] * b_n, mask, 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    place = part.to(tl.int64) * M * N + columns[None, :] * M + rows[:, None]
    tl.store(scratch + place, total, (rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def add_parts(
    scratch,
    bias,
    residual,
    c,
    M,
    N,
    r_m,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    rows = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)[None, :]
    mask = (rows < M) & (columns < N)
    size = tl.cast(M, tl.int64) * N
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, 3):
        total += tl.load(scratch + (2 - step) * size + columns * M + rows, mask, 0.0)
    if BIAS:
        total += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + rows * r_m + columns, mask, 0.0).to(tl.float32)
    tl.store(c + rows * N + columns, total, mask)


@register(op="gemm", name="uneven_thirds", role="optimized", backend="triton")
def gemm(a, b, bias=None, *, residual=None):
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), dtype=a.dtype, device=a.device)
    if M and N:
        scratch = torch.empty((3, N, M), dtype=torch.float32, device=a.device)
        grid = (triton.cdiv(N, 16), triton.cdiv(M, 32))
        part_of_tile[(*grid, 3)](a, b, scratch, M, N, K, *a.stride(), *b.stride(), K // 7, K // 2, BM=32, BN=16, BK=16)
        add_parts[grid](
            scratch,
            a if bias is None else bias,
            a if residual is None else residual,
            c,
            M,
            N,
            0 if residual is None else residual.stride(0),
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            BM=32,
            BN=16,
        )
    return c
