"""Float64 operations in exact rational arithmetic, one lane after another: what rare lanes and rare modes fall back to.

A lane costs some 10 us, so only lanes come here that vector arithmetic gets wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value

_DIGITS = 53
_LEAST = -1074  # exponent of the smallest denormal
_LARGEST = (2**53 - 1) * 2**971


def round_fraction(value: Fraction, rounding: str) -> float:
    """A nonzero rational number as a float64, rounded once; overflow as IEEE 754 has it for the mode."""
    sign, size = (-1 if value < 0 else 1), abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    last = max(exponent - _DIGITS + 1, _LEAST)
    scaled = size / Fraction(2) ** last
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    if rest and _away(rounding, sign, whole, 2 * rest, scaled.denominator):
        whole += 1
    if whole * Fraction(2) ** last > _LARGEST:
        return sign * math.inf if rounding == "rn" or _away(rounding, sign, 1, 1, 1) else sign * float(_LARGEST)
    return sign * math.ldexp(whole, last)


def _away(rounding: str, sign: int, whole: int, twice_rest: int, unit: int) -> bool:
    """Whether a value that lies between two neighbours goes to the one farther from zero."""
    if rounding == "rn":
        return twice_rest > unit or (twice_rest == unit and whole % 2 == 1)
    return (rounding == "rp" and sign > 0) or (rounding == "rm" and sign < 0)


def fma(a: float, b: float, c: float, rounding: str) -> float:
    """a * b + c, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value:
        return round_fraction(value, rounding)
    negative = math.copysign(1.0, a) * math.copysign(1.0, b) < 0
    if negative == (math.copysign(1.0, c) < 0):
        return c
    return -0.0 if rounding == "rm" else 0.0


def multiply(a: float, b: float, rounding: str) -> float:
    """a * b, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return round_fraction(Fraction(a) * Fraction(b), rounding)


def divide(a: float, b: float, rounding: str) -> float:
    """a / b, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return float(np.float64(a) / np.float64(b))
    return round_fraction(Fraction(a) / Fraction(b), rounding)


def square_root(a: float, rounding: str) -> float:
    """The square root of a, rounded once; NaN where a is negative."""
    if not a > 0 or math.isinf(a):
        return float(np.sqrt(np.float64(a)))
    # Scaled so that the integer root has at least 64 bits; a last bit of one stands for what it leaves out.
    numerator, denominator = a.as_integer_ratio()
    shift = 64 + denominator.bit_length()
    square = (numerator << (2 * shift)) // denominator
    root = math.isqrt(square)
    inexact = root * root != square or square * denominator != numerator << (2 * shift)
    return round_fraction(Fraction(2 * root + inexact, 2 << shift), rounding)


def lanes(function: Callable[..., float], rounding: str, *operands: Value) -> Value:
    """`function` of every lane's float64 operands and the rounding mode."""
    spread = np.broadcast_arrays(*operands)
    values = [function(*row, rounding) for row in zip(*(x.ravel().tolist() for x in spread), strict=True)]
    return np.array(values, np.float64).reshape(spread[0].shape)[()]
