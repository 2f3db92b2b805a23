"""RIGHT.  A program has one row and 16 columns.  It finds the expert of its row by counting the offsets up to the
row, and goes over K from the end to the beginning in blocks of 64, with products and sums in fp32.  There are no
tiles of rows, so it does not matter how rows are spread over experts."""

import torch
import triton
import triton.language as tl

from rooflab.kernels.registry import register


@triton.jit
def some_columns(
    a, b, offsets, out, E, N, K, a_t, a_k, b_e, b_k, b_n, BE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BE)
    ends = tl.load(offsets + 1 + each, each < E, 2147483647)
    expert = tl.sum((ends <= row).to(tl.int32), 0).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    total = tl.zeros((BN,), tl.float32)
    steps = tl.cdiv(K, BK)
    for step in range(0, steps):
        at = ((steps - 1 - step) * BK + tl.arange(0, BK)).to(tl.int64)
        left = tl.load(a + row * a_t + at * a_k, at < K, 0.0).to(tl.float32)
        place = b + expert * b_e + at[:, None] * b_k + columns[None, :] * b_n
        right = tl.load(place, (at < K)[:, None] & (columns < N)[None, :], 0.0).to(tl.float32)
        total += tl.sum(left[:, None] * right, 0)
    tl.store(out + row * N + columns, total, columns < N)


@register(op="gemm_grouped", name="row_by_row", role="optimized", backend="triton")
def gemm_grouped(a, b, offsets):
    (T, K), (E, _, N) = a.shape, b.shape
    out = torch.empty((T, N), dtype=a.dtype, device=a.device)
    if T and N:
        some_columns[(T, triton.cdiv(N, 16))](
            a, b, offsets, out, E, N, K, *a.stride(), *b.stride(), BE=triton.next_power_of_2(E), BN=16, BK=64
        )
    return out
