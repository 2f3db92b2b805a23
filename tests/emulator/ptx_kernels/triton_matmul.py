"""Triton's matmuls: by TMA with maps made by the host and on the device, warp-specialised, and by pointers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import Trial, blank, operands, product
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tile_product(
    a,
    b,
    pm,
    pn,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    WS: tl.constexpr,
):
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=WS):
        x = a.load([k, pm]).T if A_T else a.load([pm, k])
        y = b.load([pn, k]).T if B_T else b.load([k, pn])
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def by_tma(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr,
    WS: tl.constexpr, OUTER_WS: tl.constexpr, FLATTEN: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    am, bm, cm = a, b, c
    if ON_DEVICE:
        if A_T:
            am = tl.make_tensor_descriptor(a, [K, M], [M, 1], [BK, BM])
        else:
            am = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
        if B_T:
            bm = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
        else:
            bm = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
        cm = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    across = tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0), flatten=FLATTEN, warp_specialize=OUTER_WS
    ):
        pm, pn = tile // across * BM, tile % across * BN
        acc = tile_product(am, bm, pm, pn, K, BM, BN, BK, A_T, B_T, WS)
        cm.store([pm, pn], acc)


@triton.jit
def by_pointers(
    a, b, c, M, N, K, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), c.dtype.element_ty)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = k + depth
        x = tl.load(a + rows[:, None] * am + at[None] * ak, (rows[:, None] < M) & (at[None] < K), 0.0)
        y = tl.load(b + at[:, None] * bk + columns[None] * bn, (at[:, None] < K) & (columns[None] < N), 0.0)
        acc = tl.dot(x, y, acc, out_dtype=c.dtype.element_ty)
    tl.store(c + rows[:, None] * N + columns[None], acc, (rows[:, None] < M) & (columns[None] < N))


def tma(
    seed: int, *, M=128, N=256, K=256, BM=128, BN=128, BK=64, trans="NT", dtype="bf16", on_device=False, warps=4,
    stages=3, programs=1, ws=False, outer_ws=False, flatten=False, ctas=1,
) -> Trial:  # fmt: skip
    a, b = operands(M, N, K, trans, dtype, seed)
    c = blank(M, N)
    x, y, z = a, b, c
    if not on_device:
        x = TensorDescriptor.from_tensor(a, [BK, BM] if trans[0] == "T" else [BM, BK])
        y = TensorDescriptor.from_tensor(b, [BN, BK] if trans[1] == "T" else [BK, BN])
        z = TensorDescriptor.from_tensor(c, [BM, BN])
    tiles = -(-M // BM) * -(-N // BN)
    return Trial(
        lambda: by_tma[(min(tiles, programs) if programs else tiles,)](
            x, y, z, M, N, K, BM, BN, BK, trans[0] == "T", trans[1] == "T", ws, outer_ws, flatten, on_device,
            num_warps=warps, num_stages=stages, num_ctas=ctas,
        ),
        [c],
        [product(a, b, trans)],
    )  # fmt: skip


def pointers(
    seed: int, *, M=200, N=40, K=160, BM=128, BN=64, BK=32, trans="NN", dtype="fp16", warps=4, stages=3, ctas=1
) -> Trial:
    a, b = operands(M, N, K, trans, dtype, seed)
    c = blank(M, N, dtype=torch.int32 if dtype == "int8" else torch.float32)
    left, right = (a.T if trans[0] == "T" else a), (b.T if trans[1] == "T" else b)
    return Trial(
        lambda: by_pointers[(-(-M // BM), -(-N // BN))](
            a, b, c, M, N, K, *left.stride(), *right.stride(), BM, BN, BK, stages, num_warps=warps, num_ctas=ctas
        ),
        [c],
        [product(a, b, trans)],
    )
