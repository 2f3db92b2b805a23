"""What else Triton compiles: assertions, prints, and arguments of every kind."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import Trial, blank, whole


@triton.jit
def prints(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    tl.device_assert(a < 100, "too large")
    tl.device_print("a", a)
    tl.store(out + at, a + 1)


@triton.jit
def arguments(pair, out, flag, small, large, real, one, nothing, sizes, N: tl.constexpr, do_more: tl.constexpr = True):
    at = tl.arange(0, N)
    total = tl.load(pair[0] + at) * pair[1]
    if nothing is not None:
        total += 1000
    if flag:
        total += small
    total += (large >> 33).to(tl.int32) + one + sizes[0] * sizes[1]
    if do_more:
        tl.store(out + at, total.to(tl.float32) * real)


def _launch(kernel, args, warps=4, grid=1, **options):
    return lambda: kernel[(grid,)](*args, num_warps=warps, **options)


def printing(seed: int, *, N=128) -> Trial:
    x, out = whole((N,), seed, torch.int32), blank(N, dtype=torch.int32)
    return Trial(_launch(prints, (x, out, N), debug=True), [out], [x + 1])


def argument(seed: int, *, N=64) -> Trial:
    x, out = whole((N,), seed, torch.int32), blank(N)
    args = ((x, 3), out, True, -7, 5 << 40, 0.5, 1, None, (1, 16), N)
    return Trial(_launch(arguments, args), [out], [(x * 3 - 7 + (5 << 7) + 1 + 16) * 0.5])
