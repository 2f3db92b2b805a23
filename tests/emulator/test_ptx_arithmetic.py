"""Float arithmetic of PTX against rational numbers in every mode, and its modifiers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from ptx_reference import F32, F64, assert_same, edges, expected, grid, random_floats, rounded

from rooflab.bench.emulator.numbers import floats
from rooflab.bench.emulator.numbers.bits import F32_NAN, flush, saturate

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORMS = {np.float32: F32, np.float64: F64}
MODES = ["rn", "rz", "rm", "rp"]
OPERANDS = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "rcp": 1, "sqrt": 1}
TINY = np.finfo(np.float32).tiny
DENORMAL = np.float32(1e-40)


def operands(name: str, dtype, seed: int = 1) -> list[np.ndarray]:
    """Edges in every choice, then numbers of all sizes, half of them with a result near a cancellation."""
    rng, number = np.random.default_rng(seed), OPERANDS[name]
    found = [random_floats(rng, dtype, 1500) for _ in range(number)]
    near = rng.random(1500) < 0.3
    if name in ("add", "sub"):
        found[1][near] = (found[0] * dtype(-1.25))[near]
    if name == "fma":
        found[2][near] = -(found[0] * found[1])[near]
    at_edges = grid(edges(dtype) if number < 3 else edges(dtype)[::2], number)
    return [np.concatenate(pair) for pair in zip(at_edges, found, strict=True)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", OPERANDS)
def test_every_operation_is_rounded_once_in_every_mode(name, rounding, dtype):
    values = operands(name, dtype)
    rows = list(zip(*(x.tolist() for x in values), strict=True))
    wanted = [expected(name, rounding, FORMS[dtype], row) for row in rows]
    got = getattr(floats, name)(*values, rounding)
    assert got.dtype == dtype
    assert_same(got, wanted, *values)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("scale", [0, -150], ids=["normal", "denormal"])
def test_fma_of_float32_is_right_beside_every_kind_of_tie(scale, rounding):
    # c has an even or odd last bit; a * b is half a last bit, exactly, or off by one part in 2**46.
    rng = np.random.default_rng(2)
    last = 2.0**scale if scale else 1.0
    count = rng.integers(1 if scale else 2**23, 2**23 if scale else 2**24, 400) * 2 * (1 if rounding != "rm" else -1)
    c = (count * last).astype(np.float32)
    half = math.ldexp(1.0, scale // 2)
    offsets = np.array([2.0**-23, -(2.0**-23), 0, 2.0**-12])[rng.integers(0, 4, 400)]
    a = ((1 + offsets) * half).astype(np.float32)
    b = ((1 - offsets) * half * np.where(rng.random(400) < 0.5, 1, -1)).astype(np.float32)
    wanted = [
        rounded(Fraction(x) * Fraction(y) + Fraction(z), F32, rounding)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert_same(floats.fma(a, b, c, rounding), wanted, a, b, c)
    # The plain way is wrong on some of them, or they would prove nothing.
    if rounding == "rn":
        plain = (a.astype(np.float64) * b + c).astype(np.float32)
        assert (plain != np.array(wanted, np.float32)).any()


def test_fma_of_float64_is_right_beside_ties_and_where_the_product_overflows_or_vanishes():
    rng = np.random.default_rng(5)
    offsets = np.array([2.0**-52, -(2.0**-52), 0, 2.0**-26])[rng.integers(0, 4, 300)]
    a, b = 1 + offsets, (1 - offsets) * np.where(rng.random(300) < 0.5, 1, -1)
    c = (rng.integers(2**52, 2**53, 300) * 2).astype(np.float64)
    for shift in (0, 600, 900):
        rows = [np.ldexp(a, shift), np.ldexp(b, shift - 40), np.ldexp(c, 2 * shift - 40)]
        rows += [np.ldexp(a, -shift), np.ldexp(b, 40 - shift), np.ldexp(c, 40 - 2 * shift)]
        for x, y, z in (rows[:3], rows[3:]):
            wanted = [expected("fma", "rn", F64, row) for row in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)]
            assert_same(floats.fma(x, y, z), wanted, x, y, z)


def test_flushing_keeps_signs_and_touches_only_denormals():
    values = np.array([DENORMAL, -DENORMAL, TINY, -TINY, 0, -0.0, np.inf, np.nan], np.float32)
    assert_same(flush(values), [0, -0.0, TINY, -TINY, 0, -0.0, np.inf, np.nan])
    assert flush(np.float64(1e-310)) == 1e-310
    assert isinstance(flush(DENORMAL), np.float32) and flush(DENORMAL) == 0


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "fma"])
def test_ftz_flushes_operands_and_results(name):
    values = operands(name, np.float32, 9)
    near = np.full(9, 1.5 * TINY, np.float32), np.full(9, -TINY if name == "add" else TINY, np.float32)
    values = [np.concatenate([x, y]) for x, y in zip(values, (*near, -near[0]), strict=False)]
    plain = getattr(floats, name)(*map(flush, values))
    assert_same(getattr(floats, name)(*values, ftz=True), flush(plain), *values)
    small = (plain != 0) & (np.abs(plain) < TINY)
    assert small.any(), "no result was flushed"


def test_rcp_sqrt_min_and_max_flush_denormals():
    assert floats.rcp(DENORMAL, ftz=True) == np.inf and floats.rcp(-DENORMAL, ftz=True) == -np.inf
    assert floats.rcp(np.float32(2.0**127), ftz=True) == 0 and floats.rcp(np.float32(2.0**127)) != 0
    assert floats.sqrt(DENORMAL, ftz=True) == 0 and floats.sqrt(DENORMAL) > 0
    assert_same([floats.fmin(DENORMAL, np.float32(1), ftz=True)], [0])
    assert_same([floats.fmax(-DENORMAL, np.float32(-1), ftz=True)], [-0.0])


def test_saturation_clamps_to_0_and_1_and_makes_nan_zero():
    values = np.array([-1, -0.0, 0, 0.25, 1, 1.5, np.inf, -np.inf, np.nan])
    for dtype in (np.float32, np.float64):
        made = saturate(values.astype(dtype))
        assert made.dtype == dtype
        assert_same(made, [0, 0, 0, 0.25, 1, 1, 1, 0, 0])
    assert floats.add(np.float32(2), np.float32(3), sat=True) == 1
    assert_same([floats.fma(np.float32(np.inf), np.float32(0), np.float32(1), sat=True)], [0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
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
        assert_same(strict, np.where(np.isnan(a) | np.isnan(b), np.nan, wanted), a, b)
        if dtype is np.float32:
            assert (strict.view(np.uint32)[np.isnan(strict)] == F32_NAN.view(np.uint32)).all()
        magnitudes = function(np.abs(a), np.abs(b))
        signed = function(a, b, xorsign_abs=True)
        number = ~np.isnan(signed)
        wanted = np.where(np.signbit(a) ^ np.signbit(b), -np.abs(magnitudes), np.abs(magnitudes))
        assert_same(signed[number], wanted[number], a[number], b[number])
        assert_same(function(a, b, absolute=True), magnitudes, a, b)


def test_signs_are_cleared_inverted_and_copied():
    values = edges(np.float32)
    assert_same(floats.fabs(values), np.abs(values))
    assert_same(floats.fneg(values, ftz=True), -flush(values))
    # PTX's order: the sign of the first, the rest of the second.
    assert_same([floats.copysign(np.float32(-1), np.float32(5))], [-5])
    assert_same(floats.copysign(np.float64(-1), edges(np.float64)), -np.abs(edges(np.float64)))


def test_testp_tells_what_a_float_is():
    values = np.array([0, -0.0, 1, DENORMAL, np.inf, -np.inf, np.nan], np.float32)
    wanted = {
        "finite": [1, 1, 1, 1, 0, 0, 0],
        "infinite": [0, 0, 0, 0, 1, 1, 0],
        "number": [1, 1, 1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 0, 0, 1],
        "normal": [1, 1, 1, 0, 0, 0, 0],
        "subnormal": [0, 0, 0, 1, 0, 0, 0],
    }
    for name, bits in wanted.items():
        assert floats.testp(values, name).tolist() == [bool(bit) for bit in bits], name
    with pytest.raises(ValueError, match="property: expected one of finite"):
        floats.testp(values, "odd")


def test_an_unknown_mode_is_refused():
    for name, number in OPERANDS.items():
        with pytest.raises(ValueError, match="rounding: expected one of rn, rz, rm, rp, got 'rna'"):
            getattr(floats, name)(*[np.float32(1)] * number, "rna")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERANDS)
def test_scalars_are_one_lane_and_mix_with_vectors(name, dtype):
    function, values = getattr(floats, name), [x[:40] for x in operands(name, dtype, 4)]
    for rounding in MODES:
        vector = function(*values, rounding)
        for lane in range(40):
            single = function(*(x[lane] for x in values), rounding)
            assert type(single) is dtype
            assert_same([single], vector[lane : lane + 1])
        if len(values) > 1:
            mixed = function(values[0][3], *values[1:], rounding)
            assert_same(mixed, function(np.full_like(values[0], values[0][3]), *values[1:], rounding))
