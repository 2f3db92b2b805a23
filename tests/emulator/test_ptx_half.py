"""f16 and bf16 arithmetic of PTX is rounded once, alone and packed, and the approximate functions keep PTX's bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from ptx_reference import SHAPES, assert_same, edges, expected, random_floats, rounded

from rooflab.bench.emulator.numbers import approximate, half
from rooflab.bench.emulator.numbers.bits import flush, high_half, low_half, pack_pair
from rooflab.bench.emulator.numbers.formats import decode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ["f16", "bf16"]
OPERANDS = {"add": 2, "sub": 2, "mul": 2, "fma": 3}


def codes(kind: str, number: int, seed: int = 1, count: int = 2500) -> list[np.ndarray]:
    """Random codes, half of them of moderate size, and some whose results cancel."""
    rng = np.random.default_rng(seed)
    bias = {"f16": 15 << 10, "bf16": 127 << 7}[kind]
    spread = {"f16": 6 << 10, "bf16": 12 << 7}[kind]
    tame = (bias + rng.integers(-spread, spread, (number, count)) + (rng.integers(0, 2, (number, count)) << 15)) % 65536
    wild = rng.integers(0, 65536, (number, count))
    return list(np.where(rng.random((number, count)) < 0.6, tame, wild).astype(np.uint16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERANDS)
def test_arithmetic_of_16_bits_is_rounded_once(name, kind):
    values = codes(kind, OPERANDS[name])
    rows = zip(*(decode(x, kind).tolist() for x in values), strict=True)
    got = getattr(half, name)(*values, kind)
    assert got.dtype == np.uint16
    floats = [decode(x, kind) for x in values]
    assert_same(decode(got, kind), [expected(name, "rn", SHAPES[kind], row) for row in rows], *floats)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*OPERANDS, "fmin", "fmax", "absolute", "negative", "ex2", "tanh"])
def test_packed_pairs_are_two_single_operations(name, kind):
    function, number = getattr(half, name), OPERANDS.get(name, 2 if name in ("fmin", "fmax") else 1)
    low, high = codes(kind, number, 2, 500), codes(kind, number, 3, 500)
    pairs = [pack_pair(y, x) for x, y in zip(low, high, strict=True)]
    made = function(*pairs, kind)
    assert made.dtype == np.uint32
    assert (low_half(made) == function(*low, kind)).all() and (high_half(made) == function(*high, kind)).all()
    single = function(*(x[7] for x in pairs), kind)
    assert isinstance(single, np.uint32) and single == made[7]
    assert isinstance(function(*(x[7] for x in low), kind), np.uint16)
    if number > 1:
        assert (function(pairs[0][5], *pairs[1:], kind)[5:6] == made[5:6]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_signs_of_all_codes_change_as_bits(kind):
    every = np.arange(65536).astype(np.uint16)
    assert (half.negative(every, kind) == every ^ 0x8000).all()
    assert (half.absolute(every, kind) == every & 0x7FFF).all()
    small = decode(every, kind)
    denormal = (small != 0) & (np.abs(small) < (2.0**-14 if kind == "f16" else 2.0**-126))
    assert denormal.sum() == {"f16": 2 * 1023, "bf16": 2 * 127}[kind]
    assert (half.flush(every, kind) == np.where(denormal, every & 0x8000, every)).all()
    assert (half.absolute(every, kind, ftz=True) == half.flush(every, kind) & 0x7FFF).all()


@pytest.mark.parametrize("kind", KINDS)
def test_modifiers_flush_clamp_and_rectify(kind):
    one, two, tiny, nan = {"f16": (0x3C00, 0x4000, 0x0001, 0x7E00), "bf16": (0x3F80, 0x4000, 0x0001, 0x7FC0)}[kind]
    one, two, tiny, nan = map(np.uint16, (one, two, tiny, nan))
    assert half.add(tiny, tiny, kind) == 2 and half.add(tiny, tiny, kind, ftz=True) == 0
    assert half.add(two, one, kind, sat=True) == one and half.mul(nan, one, kind, sat=True) == 0
    assert half.fma(two, one | 0x8000, one, kind, relu=True) == 0 and half.fma(nan, one, one, kind, relu=True) == 0x7FFF
    assert half.fmin(nan, one, kind) == one and half.fmin(nan, one, kind, nan=True) == 0x7FFF
    assert half.fmax(np.uint16(0x8000), np.uint16(0), kind) == 0
    assert half.fmin(np.uint16(0), np.uint16(0x8000), kind) == 0x8000
    assert half.fmax(one | 0x8000, two, kind, xorsign_abs=True) == two | 0x8000
    with pytest.raises(ValueError, match="format: expected one of f16"):
        half.add(one, two, "f8")


TRUE = {"ex2": lambda x: 2.0**x, "lg2": math.log2, "sin": math.sin, "cos": math.cos, "tanh": math.tanh}
TRUE |= {"rcp": lambda x: 1 / x, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x)}


@pytest.mark.parametrize("name", TRUE)
def test_approximations_are_the_true_value_to_half_a_last_bit_or_little_more(name):
    rng = np.random.default_rng(4)
    values = np.concatenate([np.ldexp(rng.uniform(1, 2, 500), rng.integers(-20, 7, 500)), rng.uniform(0.4, 2.1, 500)])
    values = values.astype(np.float32)
    signed = values if name in ("lg2", "sqrt", "rsqrt") else values * rng.choice([-1, 1], 1000).astype(np.float32)
    wanted = np.array([TRUE[name](x) for x in signed.tolist()])
    error = np.abs(getattr(approximate, name)(signed).astype(np.float64) - wanted)
    assert (error <= np.spacing(np.abs(wanted).astype(np.float32)) * 0.5001).all()


INF, NAN = np.inf, np.nan
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


@pytest.mark.parametrize("name", CORNERS)
def test_corner_cases_are_those_of_the_tables_in_the_isa(name):
    assert_same(getattr(approximate, name)(np.array([-INF, -0.0, 0, INF, NAN], np.float32)), CORNERS[name])
    scalar = getattr(approximate, name)(np.float32(0.7))
    assert isinstance(scalar, np.float32)
    assert scalar == getattr(approximate, name)(np.array([0.7], np.float32))[0]


@pytest.mark.parametrize("name", [name for name in TRUE if name != "tanh"])
def test_approximations_flush_with_ftz(name):
    function, values = getattr(approximate, name), np.concatenate([edges(np.float32), np.float32([-130, 2.0**127])])
    assert_same(function(values, ftz=True), flush(function(flush(values))), values)
    assert approximate.ex2(np.float32(-130)) != 0 and approximate.ex2(np.float32(-130), ftz=True) == 0


def test_division_by_what_is_nearly_infinite_gives_zero_or_no_number():
    far = np.float32(2.0**127)
    assert_same(approximate.div(np.float32([1e30, -1e30, INF, NAN]), far), [0, -0.0, NAN, NAN])
    assert_same([approximate.div(np.float32(3), np.float32(INF))], [0])
    assert_same([approximate.div_full(np.float32(1e30), far)], [np.float32(1e30) / far])
    a, b = (random_floats(np.random.default_rng(6), np.float32, 500) for _ in range(2))
    near = np.abs(b) <= 2.0**126
    assert_same(approximate.div(a, b)[near], (a / b)[near])
    assert_same(approximate.div_full(a, b, ftz=True), flush(flush(a) / flush(b)))


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
    assert approximate.rcp_ftz_f64(ends).view(np.uint64)[-1] == 0x7FFFFFFF00000000
    assert_same(approximate.rsqrt_f64(np.array([4.0, 0.25])), [0.5, 2])
