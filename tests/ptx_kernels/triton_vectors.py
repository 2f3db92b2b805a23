"""Triton kernels without products: sorting, scans, random numbers, histograms, atomics, quantisation, reductions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import Trial, blank, normal


@triton.jit
def sorts(x, out, N: tl.constexpr, DOWN: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.sort(tl.load(x + at), descending=DOWN))


@triton.jit
def largest(x, out, N: tl.constexpr, K: tl.constexpr):
    at = tl.load(x + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out + tl.program_id(0) * K + tl.arange(0, K), tl.topk(at, K))


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
    tl.store(total + rows, tl.sum(values, 1))
    tl.store(xors + rows, tl.xor_sum(values.to(tl.int32), 1))


@triton.jit
def randoms(out, words, seed, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + at, tl.rand(seed, at))
    tl.store(words + at, tl.randint(seed, at))


@triton.jit
def histograms(x, bins, N: tl.constexpr, BINS: tl.constexpr):
    values = tl.load(x + tl.program_id(0) * N + tl.arange(0, N))
    tl.atomic_add(bins + tl.arange(0, BINS), tl.histogram(values, BINS))


@triton.jit
def integer_atomics(x, sums, tops, bottoms, ors, xors, taken, N: tl.constexpr):
    values = tl.load(x + tl.program_id(0) * N + tl.arange(0, N))
    slot = values & 7
    tl.atomic_add(sums + slot, values)
    tl.atomic_max(tops + slot, values)
    tl.atomic_min(bottoms + slot, values)
    tl.atomic_or(ors + slot, values)
    tl.atomic_xor(xors + slot, values, mask=values > 50)
    tl.atomic_cas(taken + slot, tl.zeros_like(slot), slot + 1)


@triton.jit
def quantises(x, out, scales, N: tl.constexpr, KIND: tl.constexpr, MOST: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(x + at).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-12) / MOST
    tl.store(scales + tl.program_id(0), scale)
    tl.store(out + at, (values / scale).to(KIND))


@triton.jit
def functions(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.exp(a))
    tl.store(out + N + at, tl.log(tl.abs(a)))
    tl.store(out + 2 * N + at, tl.sin(a))
    tl.store(out + 3 * N + at, tl.erf(a))
    tl.store(out + 4 * N + at, tl.sqrt(tl.abs(a)))
    tl.store(out + 5 * N + at, a / b)
    tl.store(out + 6 * N + at, tl.math.div_rn(a, b))
    tl.store(out + 7 * N + at, tl.floor(a * 10) + tl.ceil(b * 10))
    tl.store(out + 8 * N + at, tl.sigmoid(a) * tl.rsqrt(tl.abs(b)))
    tl.store(out + 9 * N + at, tl.gather(a, (at * 7 + 3) % N, 0))


@triton.jit
def integers(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a // b)
    tl.store(out + N + at, a % b)
    tl.store(out + 2 * N + at, a * b)
    tl.store(out + 3 * N + at, a >> (b & 31))
    tl.store(out + 4 * N + at, (a << (b & 15)) ^ ~b)
    tl.store(out + 5 * N + at, tl.umulhi(a.to(tl.uint32), b.to(tl.uint32)).to(tl.int32))
    tl.store(out + 6 * N + at, tl.minimum(a, b) + tl.maximum(a, b) * (a > b))
    tl.store(out + 7 * N + at, (a.to(tl.int64) * b.to(tl.int64) % 1000003).to(tl.int32))


@triton.jit
def turns(x, out, R: tl.constexpr, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, R)[:, None] * N + tl.arange(0, N)[None])
    left, right = tl.split(tl.reshape(values, (R, N // 2, 2)))
    both = tl.reshape(tl.join(right, left), (R, N))
    tl.store(out + tl.arange(0, N)[:, None] * R + tl.arange(0, R)[None], tl.trans(both))


def sort(seed: int, *, N=256, down=False, dtype="float32", warps=4) -> Trial:
    x = (normal((3, N), seed) * 50).to(getattr(torch, dtype))
    out = torch.zeros_like(x)
    return Trial(lambda: sorts[(3,)](x, out, N, down, num_warps=warps), [out], [x.sort(descending=down).values])


def top(seed: int, *, N=512, K=8) -> Trial:
    x, out = normal((2, N), seed), blank(2, K)
    return Trial(lambda: largest[(2,)](x, out, N, K), [out], [x.topk(K).values])


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
    wanted = [x.amax(1), x.argmax(1), x.argmin(1), x.double().sum(1), wanted_xor]
    return Trial(
        lambda: reductions[(programs,)](x, *found, xors, R, N, num_warps=warps, num_ctas=ctas),
        [*found, xors], wanted, relative=1e-6,
    )  # fmt: skip


def _philox(seed: int, count: int) -> torch.Tensor:
    """First words of Philox 4x32 with 10 rounds, by its definition."""
    mask, found = 0xFFFFFFFF, []
    for at in range(count):
        c, k = [at, 0, 0, 0], [seed & mask, seed >> 32]
        for _ in range(10):
            high, low = divmod(0xD2511F53 * c[0], 1 << 32), divmod(0xCD9E8D57 * c[2], 1 << 32)
            c = [low[0] ^ c[1] ^ k[0], low[1], high[0] ^ c[3] ^ k[1], high[1]]
            k = [k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask]
        found.append(c[0])
    return torch.tensor(found)


def random(seed: int, *, N=256) -> Trial:
    out, words = blank(2 * N), blank(2 * N, dtype=torch.int32)
    wanted = _philox(seed + 5, 2 * N)
    signed = wanted - (wanted >> 31 << 32)
    uniform = torch.where(signed < 0, -signed - 1, signed).double() * 4.6566127342e-10
    return Trial(lambda: randoms[(2,)](out, words, seed + 5, N), [out, words], [uniform, signed], relative=1e-6)


def histogram(seed: int, *, N=512, bins=64) -> Trial:
    x = torch.randint(0, bins, (3 * N,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found = torch.zeros(bins, dtype=torch.int32)
    return Trial(lambda: histograms[(3,)](x, found, N, bins), [found], [torch.bincount(x, minlength=bins)])


def atomics(seed: int, *, N=256) -> Trial:
    x = torch.randint(0, 100, (4 * N,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found = [torch.zeros(8, dtype=torch.int32) for _ in range(6)]
    found[2] += 1000
    wanted = torch.zeros(6, 8, dtype=torch.int64)
    for slot in range(8):
        own = x[x % 8 == slot].long()
        ors = xors = 0
        for value in own.tolist():
            ors, xors = ors | value, xors ^ (value if value > 50 else 0)
        wanted[:, slot] = torch.tensor([own.sum(), own.max(), own.min(), ors, xors, slot + 1])
    return Trial(lambda: integer_atomics[(4,)](x, *found, N), found, list(wanted))


def quantise(seed: int, *, N=512, dtype="e4m3") -> Trial:
    x = normal((4, N), seed, torch.bfloat16)
    kind, most, to = {
        "e4m3": (torch.float8_e4m3fn, 448.0, tl.float8e4nv), "e5m2": (torch.float8_e5m2, 57344.0, tl.float8e5),
    }[dtype]  # fmt: skip
    out, scales = torch.zeros(4, N, dtype=kind), blank(4)
    wanted_scales = x.float().abs().amax(1) / most
    quotients = x.float() / wanted_scales[:, None]
    # A quotient that div.full gets an ulp away may round to the next number: at most one step of the format.
    return Trial(
        lambda: quantises[(4,)](x, out, scales, N, to, most), [out, scales], [quotients.to(kind), wanted_scales],
        relative=0.15 if dtype == "e5m2" else 0.08,
    )  # fmt: skip


def function(seed: int, *, N=256) -> Trial:
    x, y = normal((N,), seed), normal((N,), seed + 1).sign() * (normal((N,), seed + 2).abs() + 0.1)
    out = blank(10, N)
    a, b = x.double(), y.double()
    wanted = [
        a.exp(), a.abs().log(), a.sin(), a.erf(), a.abs().sqrt(), a / b, a / b,
        (x * 10).floor().double() + (y * 10).ceil(), a.sigmoid() * b.abs().rsqrt(), a[(torch.arange(N) * 7 + 3) % N],
    ]  # fmt: skip
    return Trial(lambda: functions[(1,)](x, y, out, N), list(out), wanted, relative=2e-6)


def integer(seed: int, *, N=256) -> Trial:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-(2**31), 2**31, (N,), generator=generator, dtype=torch.int32)
    b = torch.randint(-1000, 1000, (N,), generator=generator, dtype=torch.int32)
    b[b == 0] = 77
    out = blank(8, N, dtype=torch.int32)
    x, y = a.long(), b.long()
    word = lambda value: (value & 0xFFFFFFFF) - ((value >> 31 & 1) << 32)
    quotient = torch.div(x, y, rounding_mode="trunc")
    wanted = [
        quotient, x - quotient * y, word(x * y), x >> (y & 31), word(word(x << (y & 15)) ^ ~y),
        word(((x & 0xFFFFFFFF) * (y & 0xFFFFFFFF)) >> 32), word(torch.minimum(x, y) + torch.maximum(x, y) * (x > y)),
        torch.fmod(x * y, 1000003),
    ]  # fmt: skip
    return Trial(lambda: integers[(1,)](a, b, out, N), list(out), wanted)


def turn(seed: int, *, R=32, N=64) -> Trial:
    x, out = normal((R, N), seed), blank(N, R)
    wanted = x.reshape(R, N // 2, 2).flip(2).reshape(R, N).T
    return Trial(lambda: turns[(1,)](x, out, R, N), [out], [wanted])
