"""The references of the tests of PTX's arithmetic: rounding of rational numbers, and numbers worth trying."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

WAYS = {
    "rn": round,  # of a Fraction: to nearest, ties to even
    "rz": math.trunc,
    "rm": math.floor,
    "rp": math.ceil,
    "rna": lambda q: math.floor(abs(q) + Fraction(1, 2)) * (1 if q > 0 else -1),
}


@dataclass(frozen=True)
class Shape:
    digits: int
    """Bits of the significand, the leading one included."""
    least: int
    """Exponent of the smallest denormal."""
    largest: Fraction


def shape(digits: int, bias: int, largest=None) -> Shape:
    top = Fraction(2) ** bias * (2 - Fraction(2) ** (1 - digits))
    return Shape(digits, 2 - bias - digits, Fraction(largest) if largest else top)


F64, F32, F16, BF16, TF32 = shape(53, 1023), shape(24, 127), shape(11, 15), shape(8, 127), shape(11, 127)
E4M3, E5M2 = shape(4, 7, 448), shape(3, 15)
SHAPES = {"f64": F64, "f32": F32, "f16": F16, "bf16": BF16, "tf32": TF32, "e4m3": E4M3, "e5m2": E5M2}


def rounded(value: Fraction, form: Shape, rounding: str) -> float:
    """A nonzero rational number as the nearest that `form` has in one direction; all of them are float64."""
    size = abs(value)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    exponent += 1 if size >= Fraction(2) ** (exponent + 1) else 0
    exponent -= 1 if size < Fraction(2) ** exponent else 0
    unit = Fraction(2) ** max(exponent - form.digits + 1, form.least)
    result = WAYS[rounding](value / unit) * unit
    if abs(result) > form.largest:
        sign = 1 if value > 0 else -1
        stays = rounding == "rz" or (rounding == "rm" and sign > 0) or (rounding == "rp" and sign < 0)
        return sign * (float(form.largest) if stays else math.inf)
    return math.copysign(float(result), value)


def expected(name: str, rounding: str, form, row: tuple[float, ...]) -> float:
    """IEEE 754's result: the rational number rounded, and NumPy's float64 where there is none."""
    name, row = ("div", (1.0, *row)) if name == "rcp" else (name, row)
    a, b, c = (*row, 0.0, 0.0)[:3]
    finite = all(map(math.isfinite, row))
    if finite and name == "sqrt" and a > 0:
        return rounded_root(a, form, rounding)
    if finite and name != "sqrt" and not (name == "div" and b == 0):
        x, y, z = map(Fraction, (a, b, c))
        exact = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}.get(name, x / y if y else Fraction(0))
        if exact:
            return rounded(exact, form, rounding)
        if name in ("add", "sub", "fma"):
            first = math.copysign(1, a) * (math.copysign(1, b) if name == "fma" else 1)
            second = math.copysign(1, {"add": b, "sub": -b, "fma": c}[name])
            return math.copysign(0.0, first + second or (-1 if rounding == "rm" else 1))
    if name == "fma":
        return c if math.isfinite(a) and math.isfinite(b) else a * b + c
    one, two = np.float64(a), np.float64(b)
    plain = {"add": one + two, "sub": one - two, "mul": one * two, "div": one / two, "sqrt": np.sqrt(one)}
    return float(plain[name])


def rounded_root(value: float, form, rounding: str) -> float:
    """The root of a positive number: 1200 bits of it, and a one after them where they are not all."""
    numerator, denominator = value.as_integer_ratio()
    square = (numerator << 2400) // denominator
    root = math.isqrt(square)
    return rounded(Fraction(2 * root + (root * root != square), 2 << 1200), form, rounding)


def same(got, expected) -> np.ndarray:
    """Which floats are the same number with the same sign, or both NaN."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return ((got == expected) & (np.signbit(got) == np.signbit(expected))) | (np.isnan(got) & np.isnan(expected))


def assert_same(got, expected, *operands) -> None:
    wrong = np.flatnonzero(~same(got, expected))
    shown = [tuple(float(x[i]).hex() for x in (*operands, got, expected)) for i in wrong[:3]]
    assert not wrong.size, f"{wrong.size} of {np.size(got)} lanes differ, first (operands, got, expected): {shown}"


def edges(dtype) -> np.ndarray:
    info = np.finfo(dtype)
    one = dtype(1)
    sizes = [0, info.smallest_subnormal, info.tiny - info.smallest_subnormal, info.tiny, one, one + info.eps]
    sizes += [one - info.epsneg, dtype(1.5), dtype(3), info.max, dtype(np.inf)]
    return np.array([*sizes, *(-x for x in map(dtype, sizes)), np.nan], dtype)


def random_floats(rng: np.random.Generator, dtype, count: int) -> np.ndarray:
    """Floats of any bits, half of them of moderate size; some have few bits, for ties."""
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    wild = rng.integers(0, np.iinfo(word).max, count, dtype=word, endpoint=True)
    few = rng.random(count) < 0.3
    wild[few] &= ~word.type((1 << (13 if word.itemsize == 4 else 40)) - 1)
    tame = np.ldexp(rng.standard_normal(count), rng.integers(-30, 30, count)).astype(dtype)
    return np.where(rng.random(count) < 0.5, wild.view(dtype), tame)


def grid(values: np.ndarray, number: int) -> list[np.ndarray]:
    """Every choice of `number` values, as one array an operand."""
    return [x.ravel() for x in np.meshgrid(*[values] * number)]


def low_half(packed):
    return packed.astype(f"u{packed.itemsize // 2}")


def high_half(packed):
    return (packed >> (4 * packed.itemsize)).astype(f"u{packed.itemsize // 2}")
