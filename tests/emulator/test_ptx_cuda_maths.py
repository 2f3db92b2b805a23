"""Arithmetic of CUDA C++ kernels, as NVRTC's own library computes it in PTX, against NumPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ptx_cuda import run

THREADS = 128
MASK = (1 << 64) - 1


def signed(value: int, bits: int = 64) -> int:
    """The number that the low bits of a value are, two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _wide(a: int, b: int) -> list[int]:
    ua, ub, low_a, low_b = a & MASK, b & MASK, signed(a, 32), signed(b, 32)
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    bytes_ = [(ua >> 8 * k & 255) for k in range(4)] + [(ub >> 8 * k & 255) for k in range(4)]
    permuted = sum(bytes_[selector] << 8 * place for place, selector in enumerate((1, 4, 2, 5)))
    clz, ffs = 64 - ua.bit_length(), (ub & -ub).bit_length()
    small = (abs(low_a - low_b) + 7 + (low_a * low_b >> 32) + permuted) & 0xFFFFFFFF
    return [
        a + b, a * b, quotient, a - quotient * b, ua // ub if ub else 0, a * b >> 64, ua * ub >> 64,
        a << (ub & 63), a >> (ub & 63), ua >> (ub & 63), ua.bit_count() + 100 * clz + 10000 * ffs,
        int(f"{ua:064b}"[::-1], 2), min(a, b) ^ max(ua, ub),
        low_a * low_b + (ua & 0xFFFFFFFF) * (ub & 0xFFFFFFFF), small, ((a * b + a) >> 70) ^ (a * b - b),
    ]  # fmt: skip


def test_64_and_128_bit_integers() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-(1 << 63), (1 << 63) - 1, (THREADS, 2), dtype=np.int64)
    x[::3, 1] >>= 40
    x[:4] = [[0, 0], [-1, 1], [1 << 62, -3], [-(1 << 63), 5]]
    y = np.zeros((THREADS, 16), np.int64)
    run("maths", "wide_integers", [x, y])
    for i in range(THREADS):
        want = [signed(value) for value in _wide(int(x[i, 0]), int(x[i, 1]))]
        # __sad is unsigned, and what all is added to is an unsigned int.
        want[14] &= 0xFFFFFFFF
        assert y[i].tolist() == want, i


def test_8_and_16_bit_integers_wrap() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(-128, 128, THREADS).astype(np.int8), rng.integers(0, 1 << 16, THREADS).astype(np.uint16)
    y = np.zeros((THREADS, 3), np.int32)
    run("maths", "narrow_integers", [a, b, y])
    c = (a.astype(np.int32) * 3 - b.astype(np.int8)).astype(np.int8)
    s = ((b + c.astype(np.int32)).astype(np.uint16).astype(np.int32) << 3).astype(np.uint16)
    top, bottom = s.astype(np.int16).astype(np.int32), (b | 1).astype(np.int16).astype(np.int32)
    assert (y[:, 0] == c).all() and (y[:, 1] == s).all()
    assert (y[:, 2] == np.trunc(top / bottom).astype(np.int32) + (c.view(np.uint8) >> 1)).all()


def inputs() -> npt.NDArray[np.float32]:
    """(128,) float32: ordinary numbers, and large ones whose sine needs a long division by pi."""
    x = (np.random.default_rng(3).standard_normal(THREADS) * 3).astype(np.float32)
    x[:6] = [0, 1e-4, -1e-4, 50.25, 1e5, -3.1415927]
    return x


def within(found: npt.NDArray[Any], want: npt.NDArray[Any], units: float) -> bool:
    """Whether numbers differ by at most so many units of their last place."""
    rounded = want.astype(found.dtype)
    return bool((np.abs(found.astype(want.dtype) - want) <= units * np.spacing(np.abs(rounded))).all())


def test_functions_of_the_library_are_as_exact_as_it_says() -> None:
    x, y = inputs(), np.zeros((THREADS, 16), np.float32)
    run("maths", "functions", [x, y])
    v = x.astype(np.float64)
    p = (np.abs(x) + np.float32(1e-3)).astype(np.float64)
    with np.errstate(over="ignore"):
        want = [
            np.sin(v), np.cos(v), np.exp(np.minimum(v, 200)), np.log(p), v / p, np.sqrt(p), 1 / np.sqrt(p),
            p ** np.float64(np.float32(1.7)), np.tanh(v), torch.erf(torch.from_numpy(v)).numpy(), np.log1p(p),
            np.exp2(v), np.fmod(v, np.float64(np.float32(0.7))), np.arctan2(v, p), np.cbrt(v), np.tan(v),
        ]  # fmt: skip
    finite = x < 80
    # Largest errors in units of the last place: CUDA C++ Programming Guide, "Mathematical Functions".
    for place, units in enumerate([2, 2, 2, 1, 0.5, 0.5, 2, 4, 2, 2, 1, 2, 0.5, 3, 1, 4]):
        assert within(y[finite, place], want[place][finite], units + 0.01), place


def test_functions_in_double_precision() -> None:
    x, y = inputs().astype(np.float64) * 1.0000001, np.zeros((THREADS, 8))
    run("maths", "double_functions", [x, y])
    v = x.astype(np.longdouble)
    p = (np.abs(x) + 1e-9).astype(np.longdouble)
    want = [np.sin(v), np.exp(np.minimum(v, 500)), np.log(p), v / p, np.sqrt(p), p ** np.longdouble(2.3), np.tanh(v)]
    finite = x < 500
    for place, values in enumerate(want):
        assert within(y[finite, place], values[finite], 2), place
    rounded = np.rint(x) + np.trunc(x) + np.ceil(x)
    assert np.allclose(y[:, 7], np.nextafter(x, np.copysign(0, x)) + x * x - np.float64(p) + rounded, atol=1e-5)


def test_roundings_and_conversions() -> None:
    x, y = inputs(), np.zeros((THREADS, 16), np.int32)
    x[6:11] = [np.nan, np.inf, -np.inf, 2.5, -3.5]
    run("maths", "conversions", [x, y])
    with np.errstate(invalid="ignore"):
        v = np.nan_to_num(x.astype(np.float64), nan=0, posinf=2**31 - 1, neginf=-(2**31))
        rounded = [np.rint(v), np.trunc(v), np.ceil(v), np.floor(v)]
    for place, want in enumerate(rounded):
        assert (y[:, place] == want).all(), place
    assert (y[:, 4].view(np.uint32) == np.where(np.isposinf(x), 2**32 - 1, np.maximum(np.trunc(v), 0))).all()
    known = np.isfinite(x)
    assert (y[known, 5] == np.trunc(v[known])).all()
    floats = y.view(np.float32)
    exact = {8: x + np.float64(np.float32(1e-7)), 9: v * np.float64(np.float32(1.1))}
    assert (floats[known, 8] >= exact[8][known]).all() and (floats[known, 9] <= exact[9][known]).all()
    assert (floats[known, 11] == (v * 1.1)[known].astype(np.float32)).all()
    sign = np.signbit(x)
    assert (y[:, 13] == np.isnan(x) + 2 * np.isinf(x) + 4 * sign + 8 * known).all()


@pytest.mark.parametrize("kind", ["half", "brain"])
def test_16_bit_floats_round_once(kind: str) -> None:
    x = np.random.default_rng(4).standard_normal((THREADS, 2)).astype(np.float32)
    dtype = torch.float16 if kind == "half" else torch.bfloat16
    pairs = torch.from_numpy(x).to(dtype).double()
    a, b = pairs[:, 0], pairs[:, 1]
    y = torch.zeros(THREADS, 12 if kind == "half" else 8, dtype=dtype)
    if kind == "half":
        run("maths", "halves", [x, y])
        small = torch.where(a < b, -a, (a + b).clamp(0, 1))
        integers = torch.from_numpy((x[:, 0] * 100).astype(np.int16)).double()
        want = [
            a + b, a * b, a * b + a, torch.maximum(a, b), a.abs().sqrt(), a / b, a * 0.5 + a, b * -3 + b, small,
            integers, a / 0.5, torch.exp2(a),
        ]  # fmt: skip
    else:
        run("maths", "brain_floats", [x, y])
        want = [a + b, a * b, a * b + a, torch.minimum(a, b), a / b, a * 1.5, b * 1.5, torch.maximum(a, b)]
    for place, values in enumerate(want):
        difference = (y[:, place].double() - values.to(dtype).double()).abs()
        # A quotient, a root and an exponential come by way of fp32, and may round the other way.
        allowed = values.abs() * 2.0 ** (-10 if kind == "half" else -7) if place in (4, 5, 10, 11) else 0 * values
        assert (difference <= allowed).all(), place


def test_8_bit_floats_saturate_and_come_back() -> None:
    x = (np.random.default_rng(5).standard_normal((THREADS, 2)) * 100).astype(np.float32)
    x[:3] = [[1e6, -1e6], [0.001, -0.001], [448, 449]]
    y, z = np.zeros((THREADS, 4), np.uint8), np.zeros((THREADS, 2), np.float32)
    run("maths", "eight_bits", [x, y, z])
    given = torch.from_numpy(x)
    e4m3 = given.clamp(-448, 448).to(torch.float8_e4m3fn)
    e5m2 = given.clamp(-57344, 57344).to(torch.float8_e5m2)
    assert (y[:, :2] == e4m3.view(torch.uint8).numpy()).all() and (y[:, 2:] == e5m2.view(torch.uint8).numpy()).all()
    assert (z[:, 0] == e4m3[:, 0].float().numpy()).all()
    assert (z[:, 1] == (e4m3[:, 1].float() + e5m2[:, 0].float()).numpy()).all()
