"""What else Triton compiles: narrow types, conversions, control flow, calls, locks, libdevice, assembly, arguments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from ptx_kernels.trial import DTYPES, Trial, blank, normal, operands, product, whole
from triton.language.extra import libdevice


@triton.jit
def narrow_arithmetic(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + N + at, a * b)
    tl.store(out + 2 * N + at, a - b * a)
    tl.store(out + 3 * N + at, tl.maximum(a, b))
    tl.store(out + 4 * N + at, tl.where(a < b, -a, tl.abs(b)))
    tl.store(out + 5 * N + at, (a.to(tl.float32) / 3.0).to(a.dtype))


@triton.jit
def conversions(x, out, N: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(KIND).to(tl.float32))


@triton.jit
def integer_conversions(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    tl.store(out + at, a.to(tl.int8).to(tl.float32))
    tl.store(out + N + at, a.to(tl.uint8).to(tl.float32))
    tl.store(out + 2 * N + at, a.to(tl.int16).to(tl.float32) + a.to(tl.int64).to(tl.float32))
    tl.store(out + 3 * N + at, (a.to(tl.int32) > 3).to(tl.float32))
    tl.store(out + 4 * N + at, a.to(tl.float64).to(tl.float32))
    tl.store(out + 5 * N + at, a.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True))


@triton.jit
def unpacked_product(a, b, c, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr):
    """C = A B with two numbers of four bits in a byte of B."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    packed = tl.load(b + tl.arange(0, K // 2)[:, None] * N + columns[None])
    low, high = (packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8
    y = tl.join(low, high).permute(0, 2, 1).reshape(K, N).to(a.dtype.element_ty)
    x = tl.load(a + rows[:, None] * K + tl.arange(0, K)[None])
    tl.store(c + rows[:, None] * N + columns[None], tl.dot(x, y))


@triton.jit
def mixed_product(a, b, c, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + rows[:, None] * K + depth[None])
    y = tl.load(b + depth[:, None] * N + columns[None]).to(x.dtype)
    tl.store(c + rows[:, None] * N + columns[None], tl.dot(x, y))


@triton.jit(noinline=True)
def collatz(value):
    steps = 0
    while value != 1:
        if value % 2 == 0:
            value = value // 2
        else:
            value = 3 * value + 1
        steps += 1
    return steps


@triton.jit
def flow(out, N):
    own = tl.program_id(0) + 1
    steps = collatz(own)
    total = 0
    for i in range(own):
        if i % 3 == 1:
            total += i * steps
    if own > N // 2:
        tl.store(out + own - 1, total)
    else:
        tl.store(out + own - 1, -steps)


@triton.jit
def locked(lock, out, N: tl.constexpr):
    at = tl.arange(0, N)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    tl.debug_barrier()
    tl.store(out + at, tl.load(out + at) * 2 + tl.program_id(0) % 2)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@triton.jit
def library(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, libdevice.tanh(a))
    tl.store(out + N + at, libdevice.pow(tl.abs(a), b))
    tl.store(out + 2 * N + at, libdevice.log1p(tl.abs(a)))
    tl.store(out + 3 * N + at, libdevice.atan2(a, b))
    tl.store(out + 4 * N + at, libdevice.rint(a * 10) + libdevice.trunc(b * 10))
    tl.store(out + 5 * N + at, libdevice.fmod(a * 10, tl.abs(b)))
    tl.store(out + 6 * N + at, libdevice.acosh(tl.abs(a) + 1.5) + libdevice.cbrt(b))
    tl.store(out + 7 * N + at, tl.cos(a * 1000.0))


@triton.jit
def assembly(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at, cache_modifier=".cg", eviction_policy="evict_last")
    b = tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $1, 0x0123; lop3.b32 $0, t, $1, 0xff00ff, 0x6a; }",
        "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(out + at, b, cache_modifier=".cs")


@triton.jit
def doubles(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a = tl.load(x + at)
    tl.store(out + at, tl.sqrt(a) * 3.0 + tl.exp(-a) / (a + 1.0))
    tl.atomic_add(out + N, tl.sum(a))


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


@triton.autotune([triton.Config({"N": 64}, num_warps=2), triton.Config({"N": 128})], key=["count"])
@triton.heuristics({"EVEN": lambda values: values["count"] % values["N"] == 0})
@triton.jit
def tuned(x, out, count, N: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    if EVEN:
        tl.store(out + at, tl.load(x + at) + N)
    else:
        tl.store(out + at, tl.load(x + at, at < count) - N, at < count)


def _launch(kernel, args, warps=4, grid=1, **options):
    return lambda: kernel[(grid,)](*args, num_warps=warps, **options)


def narrow(seed: int, *, N=256, dtype="bf16") -> Trial:
    kind = DTYPES[dtype]
    x, y = normal((N,), seed, kind), normal((N,), seed + 1, kind)
    out = torch.full((6, N), float("nan"), dtype=kind)
    a, b = x.double(), y.double()
    wanted = [a + b, a * b, a - (b * a).to(kind).double(), torch.maximum(a, b), torch.where(a < b, -a, b.abs()), a / 3]
    return Trial(_launch(narrow_arithmetic, (x, y, out, N)), list(out), wanted, 8e-3 if dtype == "bf16" else 1e-3)


def convert(seed: int, *, N=512, dtype="e4m3", source="fp32") -> Trial:
    x = (normal((N,), seed) * 20).clamp(-400, 400).to(DTYPES[source])
    out = blank(N)
    to = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "bf16": tl.bfloat16, "fp16": tl.float16}[dtype]
    return Trial(_launch(conversions, (x, out, N, to)), [out], [x.float().to(DTYPES[dtype]).double()])


def convert_integers(seed: int, *, N=256) -> Trial:
    x = normal((N,), seed).abs() * 40
    out, whole_ = blank(6, N), x.trunc().clamp(max=126).double()
    x = torch.minimum(x, torch.tensor(126.0))
    wanted = [whole_, whole_, 2 * whole_, (whole_ > 3).double(), x.double(), x.double()]
    return Trial(_launch(integer_conversions, (x, out, N)), list(out), wanted)


def four_bits(seed: int, *, M=64, N=64, K=64) -> Trial:
    a = whole((M, K), seed, torch.bfloat16)
    packed = torch.randint(0, 256, (K // 2, N), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    b = torch.stack([(packed & 15).double() - 8, (packed >> 4).double() - 8], 1).reshape(K, N)
    c = blank(M, N)
    return Trial(_launch(unpacked_product, (a, packed, c, N, K, M)), [c], [a.double() @ b])


def mixed(seed: int, *, M=64, N=64, K=64, dtype="e4m3", wide="fp16") -> Trial:
    a, b = operands(M, N, K, "NN", wide, seed)
    c, narrow_b = blank(M, N), b.to(DTYPES[dtype])
    return Trial(_launch(mixed_product, (a, narrow_b, c, N, K, M)), [c], [product(a, b, "NN")])


def flows(seed: int, *, programs=12) -> Trial:
    out, wanted = blank(programs, dtype=torch.int32), []
    for own in range(1, programs + 1):
        value, steps = own, 0
        while value != 1:
            value, steps = value // 2 if value % 2 == 0 else 3 * value + 1, steps + 1
        wanted.append(sum(i for i in range(own) if i % 3 == 1) * steps if own > programs // 2 else -steps)
    return Trial(_launch(flow, (out, programs), grid=programs), [out], [torch.tensor(wanted)])


def locks(seed: int, *, N=64, programs=5) -> Trial:
    out, first = torch.zeros(N, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch = _launch(locked, (first, out, N), grid=programs)
    same = torch.zeros(N, dtype=torch.int32)

    def run() -> None:
        launch()
        # Any order of the programs will do: two of five add one.
        assert bin(int(out[0])).count("1") == programs // 2, int(out[0])
        same.copy_(out - out[0])

    return Trial(run, [same, first], [torch.zeros(N), torch.zeros(1)])


def libraries(seed: int, *, N=256) -> Trial:
    x, y = normal((N,), seed), normal((N,), seed + 1)
    y = y.sign() * (y.abs() + 0.1)
    a, b = x.double(), y.double()
    scaled = (x * 1000.0).double()
    out = blank(8, N)
    wanted = [
        a.tanh(), a.abs().pow(b), a.abs().log1p(), torch.atan2(a, b), (x * 10).round() + (y * 10).trunc(),
        torch.fmod(x * 10, y.abs()), (a.abs() + 1.5).acosh() + b.sign() * b.abs().pow(1 / 3), scaled.cos(),
    ]  # fmt: skip
    return Trial(_launch(library, (x, y, out, N)), list(out), wanted, 5e-6)


def inline(seed: int, *, N=256) -> Trial:
    x = torch.randint(-(2**31), 2**31, (N,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    a = x.long() & 0xFFFFFFFF
    turned = (a & 0xFF) << 24 | (a >> 8 & 0xFF) << 16 | (a >> 16 & 0xFF) << 8 | a >> 24
    # 0x6a: the exclusive or of the last with the conjunction of the first two.
    wanted = (turned & a) ^ 0xFF00FF
    out = blank(N, dtype=torch.int32)
    return Trial(_launch(assembly, (x, out, N)), [out], [wanted - (wanted >> 31 << 32)])


def double(seed: int, *, N=256) -> Trial:
    x, out = normal((N,), seed).double().abs(), torch.zeros(N + 1, dtype=torch.float64)
    wanted = torch.cat([x.sqrt() * 3 + (-x).exp() / (x + 1), x.sum()[None]])
    return Trial(_launch(doubles, (x, out, N)), [out], [wanted], 1e-12)


def printing(seed: int, *, N=128) -> Trial:
    x, out = whole((N,), seed, torch.int32), blank(N, dtype=torch.int32)
    return Trial(_launch(prints, (x, out, N), debug=True), [out], [x + 1])


def argument(seed: int, *, N=64) -> Trial:
    x, out = whole((N,), seed, torch.int32), blank(N)
    args = ((x, 3), out, True, -7, 5 << 40, 0.5, 1, None, (1, 16), N)
    return Trial(_launch(arguments, args), [out], [(x * 3 - 7 + (5 << 7) + 1 + 16) * 0.5])


def tune(seed: int, *, count=200) -> Trial:
    x, out = whole((count,), seed), blank(count)
    return Trial(lambda: tuned[lambda values: (triton.cdiv(count, values["N"]),)](x, out, count), [out], [x - 64])
