"""Float arithmetic of PTX of every width against rational numbers, its modifiers, and the approximate functions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from ptx_reference import SHAPES, assert_same, edges, expected, grid, high_half, low_half, random_floats, rounded

from rooflab.bench.emulator.numbers import approximate, floats, half
from rooflab.bench.emulator.numbers.bits import F32_NAN, flush, pack_pair, saturate
from rooflab.bench.emulator.numbers.formats import decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = {"f32": np.float32, "f64": np.float64}
KINDS = ["f16", "bf16"]
MODES = ["rn", "rz", "rm", "rp"]
OPERANDS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "rcp": 1, "sqrt": 1}
HALVES = ["add", "sub", "mul", "fma"]
TINY = np.finfo(np.float32).tiny
DENORMAL = np.float32(1e-40)
INF, NAN = np.inf, np.nan


def operands(name: str, dtype, seed: int = 1) -> list[np.ndarray]:
    """Edges in every choice, then numbers of all sizes, half of them with a result near a cancellation."""
    rng, number = np.random.default_rng(seed), OPERANDS[name]
    found = [random_floats(rng, dtype, 500) for _ in range(number)]
    near = rng.random(500) < 0.3
    if name in ("add", "sub"):
        found[1][near] = (found[0] * dtype(-1.25))[near]
    if name == "fma":
        found[2][near] = -(found[0] * found[1])[near]
    at_edges = grid(edges(dtype) if number < 3 else edges(dtype)[::2], number)
    return [np.concatenate(pair) for pair in zip(at_edges, found, strict=True)]


def codes(kind: str, number: int, seed: int = 1, count: int = 800) -> list[np.ndarray]:
    """Random codes of 16 bits, half of them of moderate size, and some whose results cancel."""
    rng = np.random.default_rng(seed)
    bias = {"f16": 15 << 10, "bf16": 127 << 7}[kind]
    spread = {"f16": 6 << 10, "bf16": 12 << 7}[kind]
    tame = (bias + rng.integers(-spread, spread, (number, count)) + (rng.integers(0, 2, (number, count)) << 15)) % 65536
    wild = rng.integers(0, 65536, (number, count))
    return list(np.where(rng.random((number, count)) < 0.6, tame, wild).astype(np.uint16))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", OPERANDS)
def test_every_operation_is_rounded_once_in_every_mode(name, rounding, kind):
    """Of vectors; a scalar is one lane of them, and may stand beside them."""
    function, values = getattr(floats, name), operands(name, DTYPES[kind])
    rows = list(zip(*(x.tolist() for x in values), strict=True))
    made = function(*values, rounding=rounding)
    assert made.dtype == DTYPES[kind]
    assert_same(made, [expected(name, rounding, SHAPES[kind], row) for row in rows], *values)
    for lane in range(0, 200, 5):
        single = function(*(x[lane] for x in values), rounding=rounding)
        assert type(single) is DTYPES[kind]
        assert_same([single], made[lane : lane + 1])
    if len(values) > 1:
        mixed = function(values[0][3], *values[1:], rounding=rounding)
        assert_same(mixed, function(np.full_like(values[0], values[0][3]), *values[1:], rounding=rounding))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HALVES)
def test_arithmetic_of_16_bits_is_rounded_once(name, kind):
    values = codes(kind, OPERANDS[name])
    decoded = [decode(x, kind) for x in values]
    made = getattr(half, name)(*values, kind)
    assert made.dtype == np.uint16
    rows = zip(*(x.tolist() for x in decoded), strict=True)
    assert_same(decode(made, kind), [expected(name, "rn", SHAPES[kind], row) for row in rows], *decoded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*HALVES, "fmin", "fmax", "fabs", "fneg", "ex2", "tanh"])
def test_packed_pairs_are_two_single_operations(name, kind):
    function, number = getattr(half, name), OPERANDS.get(name, 2 if name in ("fmin", "fmax") else 1)
    low, high = codes(kind, number, 2, 500), codes(kind, number, 3, 500)
    pairs = [pack_pair(y, x) for x, y in zip(low, high, strict=True)]
    made = function(*pairs, kind)
    assert made.dtype == np.uint32
    assert (low_half(made) == function(*low, kind)).all() and (high_half(made) == function(*high, kind)).all()
    single = function(*(x[7] for x in pairs), kind)
    assert isinstance(single, np.uint32) and single == made[7]


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("scale", [0, -150], ids=["normal", "denormal"])
def test_fma_of_float32_is_right_beside_every_kind_of_tie(scale, rounding):
    # c has an even or odd last bit; a * b is half a last bit, exactly, or off by one part in 2**46.
    rng = np.random.default_rng(2)
    last = 2.0**scale if scale else 1.0
    count = rng.integers(1 if scale else 2**23, 2**23 if scale else 2**24, 400) * 2 * (1 if rounding != "rm" else -1)
    c = (count * last).astype(np.float32)
    size = math.ldexp(1.0, scale // 2)
    offsets = np.array([2.0**-23, -(2.0**-23), 0, 2.0**-12])[rng.integers(0, 4, 400)]
    a = ((1 + offsets) * size).astype(np.float32)
    b = ((1 - offsets) * size * np.where(rng.random(400) < 0.5, 1, -1)).astype(np.float32)
    wanted = [
        rounded(Fraction(x) * Fraction(y) + Fraction(z), SHAPES["f32"], rounding)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert_same(floats.fma(a, b, c, rounding=rounding), wanted, a, b, c)


def test_fma_of_float64_is_right_beside_ties_and_where_the_product_overflows_or_vanishes():
    rng = np.random.default_rng(5)
    offsets = np.array([2.0**-52, -(2.0**-52), 0, 2.0**-26])[rng.integers(0, 4, 300)]
    a, b = 1 + offsets, (1 - offsets) * np.where(rng.random(300) < 0.5, 1, -1)
    c = (rng.integers(2**52, 2**53, 300) * 2).astype(np.float64)
    for shift in (0, 600, 900):
        rows = [np.ldexp(a, shift), np.ldexp(b, shift - 40), np.ldexp(c, 2 * shift - 40)]
        rows += [np.ldexp(a, -shift), np.ldexp(b, 40 - shift), np.ldexp(c, 40 - 2 * shift)]
        for x, y, z in (rows[:3], rows[3:]):
            values = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
            assert_same(floats.fma(x, y, z), [expected("fma", "rn", SHAPES["f64"], row) for row in values], x, y, z)


def test_fma_of_bf16_is_right_where_float64_rounds_to_a_tie():
    # 1.0625**2 is 1.125 and half a last bit, a tie that a term 140 binary places below it decides.
    a, c = np.uint16(0x5388), np.array([0x2180, 0xA180, 0], np.uint16)
    assert decode(a, "bf16") == 1.0625 * 2.0**40 and decode(c, "bf16").tolist() == [2.0**-60, -(2.0**-60), 0]
    assert (decode(half.fma(a, a, c, "bf16"), "bf16") / 2.0**80).tolist() == [1.1328125, 1.125, 1.125]


def test_products_of_bf16_are_rounded_once_where_float32_is_denormal():
    rng = np.random.default_rng(11)
    # Significands of every kind; exponents that add up to between 2**-138 and 2**-124.
    size = rng.integers(-138, -124, 4000)
    first = rng.integers(-80, -50, 4000)
    a, b = (((127 + e) << 7 | rng.integers(0, 128, 4000)).astype(np.uint16) for e in (first, size - first))
    x, y = decode(a, "bf16").tolist(), decode(b, "bf16").tolist()
    wanted = [rounded(Fraction(p) * Fraction(q), SHAPES["bf16"], "rn") for p, q in zip(x, y, strict=True)]
    assert_same(decode(half.mul(a, b, "bf16"), "bf16"), wanted, x, y)


# Modifiers


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "fma"])
def test_ftz_flushes_operands_and_results(name):
    values = operands(name, np.float32, 9)
    near = np.full(9, 1.5 * TINY, np.float32), np.full(9, -TINY if name == "add" else TINY, np.float32)
    values = [np.concatenate([x, y]) for x, y in zip(values, (*near, -near[0]), strict=False)]
    plain = getattr(floats, name)(*map(flush, values))
    assert_same(getattr(floats, name)(*values, ftz=True), flush(plain), *values)
    assert ((plain != 0) & (np.abs(plain) < TINY)).any(), "no result was flushed"


def test_flushing_keeps_signs_and_touches_only_denormals():
    values = np.array([DENORMAL, -DENORMAL, TINY, -TINY, 0, -0.0, INF, NAN], np.float32)
    assert_same(flush(values), [0, -0.0, TINY, -TINY, 0, -0.0, INF, NAN])
    assert flush(np.float64(1e-310)) == 1e-310
    assert floats.rcp(DENORMAL, ftz=True) == INF and floats.rcp(-DENORMAL, ftz=True) == -INF
    assert floats.rcp(np.float32(2.0**127), ftz=True) == 0 and floats.rcp(np.float32(2.0**127)) != 0
    assert floats.sqrt(DENORMAL, ftz=True) == 0 and floats.sqrt(DENORMAL) > 0
    assert_same([floats.fmin(DENORMAL, np.float32(1), ftz=True)], [0])
    assert_same([floats.fmax(-DENORMAL, np.float32(-1), ftz=True)], [-0.0])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_saturation_clamps_to_0_and_1_and_makes_nan_zero(dtype):
    values = np.array([-1, -0.0, 0, 0.25, 1, 1.5, INF, -INF, NAN], dtype)
    assert saturate(values).dtype == dtype
    assert_same(saturate(values), [0, 0, 0, 0.25, 1, 1, 1, 0, 0])
    assert floats.add(dtype(2), dtype(3), sat=True) == 1
    assert_same([floats.fma(dtype(INF), dtype(0), dtype(1), sat=True)], [0])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_min_and_max_take_the_number_and_order_zeros(dtype):
    a, b = grid(edges(dtype), 2)
    key_a, key_b = a + 0.0, b + 0.0
    for function, first in ((floats.fmin, (key_a < key_b)), (floats.fmax, key_a > key_b)):
        wanted = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where(first, a, b)))
        zeros = (a == 0) & (b == 0)
        negative = np.signbit(a) | np.signbit(b) if function is floats.fmin else np.signbit(a) & np.signbit(b)
        wanted[zeros] = np.where(negative[zeros], -0.0, 0.0)
        assert_same(function(a, b), wanted, a, b)
        strict = function(a, b, nan=True)
        assert_same(strict, np.where(np.isnan(a) | np.isnan(b), NAN, wanted), a, b)
        if dtype is np.float32:
            assert (strict.view(np.uint32)[np.isnan(strict)] == F32_NAN.view(np.uint32)).all()
        magnitudes = function(np.abs(a), np.abs(b))
        signed = function(a, b, xorsign_abs=True)
        number = ~np.isnan(signed)
        wanted = np.where(np.signbit(a) ^ np.signbit(b), -np.abs(magnitudes), np.abs(magnitudes))
        assert_same(signed[number], wanted[number], a[number], b[number])


@pytest.mark.parametrize("kind", KINDS)
def test_signs_of_all_codes_change_as_bits(kind):
    every = np.arange(65536).astype(np.uint16)
    assert (half.fneg(every, kind) == every ^ 0x8000).all()
    assert (half.fabs(every, kind) == every & 0x7FFF).all()
    small = decode(every, kind)
    denormal = (small != 0) & (np.abs(small) < (2.0**-14 if kind == "f16" else 2.0**-126))
    assert denormal.sum() == {"f16": 2 * 1023, "bf16": 2 * 127}[kind]
    assert (half.flush(every, kind) == np.where(denormal, every & 0x8000, every)).all()
    assert (half.fabs(every, kind, ftz=True) == half.flush(every, kind) & 0x7FFF).all()


@pytest.mark.parametrize("kind", KINDS)
def test_modifiers_of_16_bits_flush_clamp_and_rectify(kind):
    one, two, tiny, nan = {"f16": (0x3C00, 0x4000, 0x0001, 0x7E00), "bf16": (0x3F80, 0x4000, 0x0001, 0x7FC0)}[kind]
    one, two, tiny, nan = map(np.uint16, (one, two, tiny, nan))
    assert half.add(tiny, tiny, kind) == 2 and half.add(tiny, tiny, kind, ftz=True) == 0
    assert half.add(two, one, kind, sat=True) == one and half.mul(nan, one, kind, sat=True) == 0
    assert half.fma(two, one | 0x8000, one, kind, relu=True) == 0 and half.fma(nan, one, one, kind, relu=True) == 0x7FFF
    assert half.fmin(nan, one, kind) == one and half.fmin(nan, one, kind, nan=True) == 0x7FFF
    assert half.fmax(np.uint16(0x8000), np.uint16(0), kind) == 0
    assert half.fmin(np.uint16(0), np.uint16(0x8000), kind) == 0x8000
    assert half.fmax(one | 0x8000, two, kind, xorsign_abs=True) == two | 0x8000


# Approximate functions

TRUE = {"ex2": lambda x: 2.0**x, "lg2": math.log2, "sin": math.sin, "cos": math.cos, "tanh": math.tanh}
TRUE |= {"rcp": lambda x: 1 / x, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x)}
CORNERS = {
    "ex2": [0, 1, 1, INF, NAN],
    "lg2": [NAN, -INF, -INF, INF, NAN],
    "sin": [NAN, -0.0, 0, NAN, NAN],
    "cos": [NAN, 1, 1, NAN, NAN],
    "tanh": [-1, -0.0, 0, 1, NAN],
    "rcp": [-0.0, -INF, INF, 0, NAN],
    "sqrt": [NAN, -0.0, 0, INF, NAN],
    "rsqrt": [NAN, -INF, INF, 0, NAN],
}
"""What the tables of the ISA have for -inf, -0, 0, inf and NaN."""


@pytest.mark.parametrize("name", TRUE)
def test_approximations_are_the_true_value_to_half_a_last_bit_or_little_more(name):
    function, rng = getattr(approximate, name, None) or getattr(floats, name), np.random.default_rng(4)
    values = np.concatenate([np.ldexp(rng.uniform(1, 2, 500), rng.integers(-20, 7, 500)), rng.uniform(0.4, 2.1, 500)])
    values = values.astype(np.float32)
    signed = values if name in ("lg2", "sqrt", "rsqrt") else values * rng.choice([-1, 1], 1000).astype(np.float32)
    wanted = np.array([TRUE[name](x) for x in signed.tolist()])
    error = np.abs(function(signed).astype(np.float64) - wanted)
    assert (error <= np.spacing(np.abs(wanted).astype(np.float32)) * 0.5001).all()
    assert_same(function(np.array([-INF, -0.0, 0, INF, NAN], np.float32)), CORNERS[name])
    single = function(signed[0])
    assert isinstance(single, np.float32) and single == function(signed[:1])[0]
    values = np.concatenate([edges(np.float32), np.float32([-130, 2.0**127])])
    assert_same(function(values, ftz=True), flush(function(flush(values))), values)


def test_division_by_what_is_nearly_infinite_gives_zero_or_no_number():
    far = np.float32(2.0**127)
    assert_same(approximate.div(np.float32([1e30, -1e30, INF, NAN]), far), [0, -0.0, NAN, NAN])
    assert_same([approximate.div(np.float32(3), np.float32(INF))], [0])
    a, b = (random_floats(np.random.default_rng(6), np.float32, 500) for _ in range(2))
    near = np.abs(b) <= 2.0**126
    assert_same(approximate.div(a, b)[near], (a / b)[near])


def test_float64_approximations_keep_the_upper_word():
    rng = np.random.default_rng(8)
    values = np.ldexp(rng.uniform(1, 2, 200), rng.integers(-900, 900, 200))
    for function, true in ((approximate.rcp_ftz_f64, 1 / values), (approximate.rsqrt_ftz_f64, 1 / np.sqrt(values))):
        made = function(values)
        assert not (made.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
        assert (np.abs(made / true - 1) < 2.0**-18).all()
    ends = np.array([-INF, -1e-310, -0.0, 0, 1e-310, INF, NAN])
    assert_same(approximate.rcp_ftz_f64(ends), [-0.0, -INF, -INF, INF, INF, 0, NAN])
    assert_same(approximate.rsqrt_ftz_f64(ends), [NAN, -INF, -INF, INF, INF, 0, NAN])
    assert_same(approximate.rsqrt_f64(np.array([4.0, 0.25])), [0.5, 2])
