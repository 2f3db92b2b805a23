"""Triton kernels with TMA of every rank, half outside of the tensor; TMA that adds; and options of a product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import DTYPES, Trial, blank, normal, operands, product, whole
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def moves(x, y, source, target):
    y.store(target, x.load(source))


PLACES = {
    1: ([100], [64], [-8], [60]),
    2: ([20, 48], [8, 32], [-3, 32], [14, 24]),
    3: ([5, 20, 40], [2, 8, 32], [4, -4, 16], [1, 14, 24]),
    4: ([3, 5, 20, 40], [1, 2, 8, 32], [2, 4, 16, 24], [0, 1, -2, 24]),
    5: ([2, 3, 5, 20, 24], [1, 1, 2, 4, 16], [1, 2, 4, -2, 16], [0, 1, 1, 18, 0]),
}
"""By rank: shape, box, where it is read, where it is written."""


@triton.jit
def adds_by_tma(a, c, N, BM: tl.constexpr, BN: tl.constexpr, WHAT: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    x = tl.load(a + rows[:, None] * N + columns[None])
    if WHAT == "add":
        c.atomic_add([0, 0], x)
    elif WHAT == "min":
        c.atomic_min([0, 0], x)
    else:
        c.atomic_xor([0, 0], x)


@triton.jit
def dots(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + rows[:, None] * K + depth[None]), tl.load(b + depth[:, None] * N + columns[None])
    acc = tl.full((M, N), 3, c.dtype.element_ty)
    if IMPRECISE:
        acc = tl.dot(x, y, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    tl.store(c + rows[:, None] * N + columns[None], acc)


def move(seed: int, *, rank=2, dtype="fp32", padding="zero") -> Trial:
    shape, box, source, target = PLACES[rank]
    kind = getattr(torch, dtype) if hasattr(torch, dtype) else DTYPES[dtype]
    x, y = whole(shape, seed, kind), whole(shape, seed + 1, kind)
    wanted = y.clone()
    fill = 99.0 if padding == "nan" else 0.0
    for place in torch.cartesian_prod(*map(torch.arange, box)).reshape(-1, rank):
        to = [int(i + start) for i, start in zip(place, target, strict=True)]
        at = [int(i + start) for i, start in zip(place, source, strict=True)]
        if all(0 <= i < size for i, size in zip(to, shape, strict=True)):
            inside = all(0 <= i < size for i, size in zip(at, shape, strict=True))
            wanted[tuple(to)] = x[tuple(at)] if inside else fill
    maps = [TensorDescriptor.from_tensor(t, box, own) for t, own in ((x, padding), (y, "zero"))]

    def launch() -> None:
        moves[(1,)](*maps, tuple(source), tuple(target))
        y.nan_to_num_(nan=99.0)

    return Trial(launch, [y], [wanted])


def reduces(seed: int, *, what="add", dtype="float32", programs=3) -> Trial:
    kind = getattr(torch, dtype)
    a, c = whole((programs * 64, 64), seed, kind), whole((64, 64), seed + 1, kind)
    wanted = c.clone()
    for part in a.split(64):
        wanted = {"add": torch.add, "min": torch.minimum, "xor": torch.bitwise_xor}[what](wanted, part)
    to = TensorDescriptor.from_tensor(c, [64, 64])
    return Trial(lambda: adds_by_tma[(programs,)](a, to, 64, 64, 64, what), [c], [wanted])


def dot(
    seed: int, *, M=64, N=64, K=64, dtype="fp16", out="float32", precision="tf32", imprecise=0, relative=0.0, warps=4
) -> Trial:
    a, b = operands(M, N, K, "NN", dtype, seed)
    if relative:
        a, b = normal((M, K), seed, DTYPES[dtype]), normal((K, N), seed + 1, DTYPES[dtype])
    c = blank(M, N, dtype=getattr(torch, out))
    return Trial(
        lambda: dots[(1,)](a, b, c, M, N, K, precision, imprecise, num_warps=warps),
        [c],
        [product(a, b, "NN") + 3],
        relative,
    )
