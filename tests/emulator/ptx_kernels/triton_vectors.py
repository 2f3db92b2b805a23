"""Triton kernels without products: sorting, scans, reductions; and arguments of every kind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import Trial, blank, normal, whole


@triton.jit
def sorts(x, out, N: tl.constexpr, DOWN: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.sort(tl.load(x + at), descending=DOWN))


@triton.jit
def multiply_add(gain, offset, next_gain, next_offset):
    return gain * next_gain, offset * next_gain + next_offset


@triton.jit
def scans(x, sums, products, recurrences, R: tl.constexpr, N: tl.constexpr, BACK: tl.constexpr):
    at = tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None]
    values = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(values, 1, reverse=BACK))
    tl.store(products + at, tl.cumprod(tl.where(values > 0, 1.0, -1.0), 0))
    gain = tl.full((R, N), 0.5, tl.float32)
    _, kept = tl.associative_scan((gain, values), 1, multiply_add, reverse=BACK)
    tl.store(recurrences + at, kept)


@triton.jit
def reductions(x, most, where, least, total, xors, R: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, N)
    values = tl.load(x + rows[:, None] * N + columns[None])
    tl.store(most + rows, tl.max(values, 1))
    tl.store(where + rows, tl.argmax(values, 1))
    tl.store(least + rows, tl.argmin(values, 1))
    tl.store(total + rows, tl.sum(values * values, 1))
    tl.store(xors + rows, tl.xor_sum(values.to(tl.int32), 1))


def sort(seed: int, *, N=256, down=False, dtype="float32", warps=4) -> Trial:
    x = (normal((3, N), seed) * 50).to(getattr(torch, dtype))
    out = torch.zeros_like(x)
    return Trial(lambda: sorts[(3,)](x, out, N, down, num_warps=warps), [out], [x.sort(descending=down).values])


def scan(seed: int, *, R=8, N=64, back=False, warps=4) -> Trial:
    x = normal((R, N), seed)
    found = [blank(R, N) for _ in range(3)]
    turned = x.double().flip(1) if back else x.double()
    recurrence = torch.zeros(R, N, dtype=torch.float64)
    for column in range(N):
        recurrence[:, column] = turned[:, column] + (0.5 * recurrence[:, column - 1] if column else 0)
    sums = turned.cumsum(1)
    wanted = [sums.flip(1) if back else sums, x.sign().double().cumprod(0), recurrence.flip(1) if back else recurrence]
    return Trial(lambda: scans[(1,)](x, *found, R, N, back, num_warps=warps), found, wanted, relative=1e-6)


def reduce(seed: int, *, R=16, N=128, programs=2, warps=4, ctas=1) -> Trial:
    x = normal((R * programs, N), seed) * 1000
    found = [blank(R * programs, dtype=kind) for kind in (torch.float32, torch.int32, torch.int32, torch.float32)]
    xors = blank(R * programs, dtype=torch.int32)
    wanted_xor = torch.zeros(R * programs, dtype=torch.int32)
    for column in x.to(torch.int32).T:
        wanted_xor ^= column
    wanted = [x.amax(1), x.argmax(1), x.argmin(1), x.double().square().sum(1), wanted_xor]
    return Trial(
        lambda: reductions[(programs,)](x, *found, xors, R, N, num_warps=warps, num_ctas=ctas),
        [*found, xors],
        wanted,
        relative=1e-6,
    )


@triton.jit
def takes(pair, out, flag, small, large, real, one, nothing, sizes, N: tl.constexpr, do_more: tl.constexpr = True):
    at = tl.arange(0, N)
    total = tl.load(pair[0] + at) * pair[1]
    tl.device_assert(total < 1000, "too large")
    tl.device_print("total", total)
    if nothing is not None:
        total += 1000
    if flag:
        total += small
    total += (large >> 33).to(tl.int32) + one + sizes[0] * sizes[1]
    if do_more:
        tl.store(out + at, total.to(tl.float32) * real)


def arguments(seed: int, *, N=64) -> Trial:
    x, out = whole((N,), seed, torch.int32), blank(N)
    args = ((x, 3), out, True, -7, 5 << 40, 0.5, 1, None, (1, 16), N)
    return Trial(lambda: takes[(1,)](*args, debug=True), [out], [(x * 3 - 7 + (5 << 7) + 1 + 16) * 0.5])
