"""Triton kernels whose programs meet in global memory: split-K with atomics and by the last to arrive, and TMA that
adds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import Trial, blank, operands, product, whole
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def partial_product(a, b, N, K, rows, columns, part, BK: tl.constexpr, PARTS: tl.constexpr):
    acc = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for k in range(part * BK, K, PARTS * BK):
        depth = k + tl.arange(0, BK)
        x = tl.load(a + rows[:, None] * K + depth[None])
        y = tl.load(b + depth[:, None] * N + columns[None])
        acc = tl.dot(x, y, acc)
    return acc


@triton.jit
def with_atomics(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = partial_product(a, b, N, K, rows, columns, tl.program_id(2), BK, PARTS)
    tl.atomic_add(c + rows[:, None] * N + columns[None], acc, sem="relaxed")


@triton.jit
def by_the_last(
    a, b, c, kept, arrived, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr
):
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = partial_product(a, b, N, K, rows, columns, tl.program_id(2), BK, PARTS)
    within = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None]
    tl.store(kept + (tile * PARTS + tl.program_id(2)) * BM * BN + within, acc)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
        total = tl.zeros((BM, BN), tl.float32)
        for part in range(PARTS):
            total += tl.load(kept + (tile * PARTS + part) * BM * BN + within)
        tl.store(c + rows[:, None] * N + columns[None], total)


@triton.jit
def adds_by_tma(a, c, M, N, BM: tl.constexpr, BN: tl.constexpr, WHAT: tl.constexpr):
    rows, columns = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)
    x = tl.load(a + rows[:, None] * N + columns[None])
    if WHAT == "add":
        c.atomic_add([0, 0], x)
    elif WHAT == "max":
        c.atomic_max([0, 0], x)
    elif WHAT == "min":
        c.atomic_min([0, 0], x)
    elif WHAT == "and":
        c.atomic_and([0, 0], x)
    elif WHAT == "or":
        c.atomic_or([0, 0], x)
    else:
        c.atomic_xor([0, 0], x)


@triton.jit
def waits_for_others(values, flags, out, N: tl.constexpr, PROGRAMS: tl.constexpr):
    own, at = tl.program_id(0), tl.arange(0, N)
    tl.store(values + own * N + at, own * 100 + at)
    tl.debug_barrier()
    tl.atomic_xchg(flags + own, 1, sem="release")
    other = (own + 1) % PROGRAMS
    while tl.atomic_add(flags + other, 0, sem="acquire") == 0:
        pass
    tl.debug_barrier()
    tl.store(out + own * N + at, tl.load(values + other * N + at))


def atomics(seed: int, *, M=128, N=128, K=256, parts=4) -> Trial:
    a, b = operands(M, N, K, "NN", "bf16", seed)
    c = torch.zeros(M, N)
    grid = (M // 64, N // 64, parts)
    return Trial(lambda: with_atomics[grid](a, b, c, N, K, 64, 64, 32, parts), [c], [product(a, b, "NN")])


def last(seed: int, *, M=128, N=64, K=256, parts=4) -> Trial:
    a, b = operands(M, N, K, "NN", "fp16", seed)
    c, kept = blank(M, N), blank(M * N * parts)
    arrived = torch.zeros(M * N // 4096, dtype=torch.int32)
    grid = (M // 64, N // 64, parts)
    return Trial(lambda: by_the_last[grid](a, b, c, kept, arrived, N, K, 64, 64, 32, parts), [c], [product(a, b, "NN")])


def tma_reduces(seed: int, *, what="add", dtype="float32", programs=3) -> Trial:
    kind = getattr(torch, dtype)
    a, c = whole((programs * 64, 64), seed, kind), whole((64, 64), seed + 1, kind)
    wanted = c.clone()
    for part in a.split(64):
        wanted = {
            "add": torch.add, "max": torch.maximum, "min": torch.minimum, "and": torch.bitwise_and,
            "or": torch.bitwise_or, "xor": torch.bitwise_xor,
        }[what](wanted, part)  # fmt: skip
    to = TensorDescriptor.from_tensor(c, [64, 64])
    return Trial(lambda: adds_by_tma[(programs,)](a, to, programs * 64, 64, 64, 64, what), [c], [wanted])


def flags(seed: int, *, programs=6) -> Trial:
    values, out = blank(programs, 256, dtype=torch.int32), blank(programs, 256, dtype=torch.int32)
    set_ = torch.zeros(programs, dtype=torch.int32)
    wanted = (torch.arange(programs)[:, None] * 100 + torch.arange(256)).roll(-1, 0)
    return Trial(lambda: waits_for_others[(programs,)](values, set_, out, 256, programs), [out], [wanted])
