"""Implements PTX's float instructions: add, sub, mul, fma, div, rcp, sqrt, min, max, abs, neg, copysign, testp.

The source is PTX ISA 8.7, section "Floating Point Instructions".  Operands and result have the same type, float32 or
float64.  `.ftz` applies to float32 alone.  A NaN result has NumPy's bits, because PTX does not specify them.  Raises
`ValueError` on a rounding mode that PTX does not have.

The `exact_` functions use rational arithmetic, which costs about 10 us per lane.  They are used only for rare lanes and
modes in which vector arithmetic is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from rooflab.bench.emulator.numbers.bits import (
    Value,
    canonical,
    check_rounding,
    flush,
    full,
    narrow,
    odd_sum,
    pick,
    saturate,
    some,
    unsigned,
    with_sign,
)

_SIGNIFICAND_BITS = 53
_MIN_EXPONENT = -1074  # exponent of the smallest denormal
_LARGEST_FLOAT64 = (2**53 - 1) * 2**971
_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_EXTRA_F64_BITS = np.uint64(0x1FFFFFFF)  # the bits of a float64 that a normal float32 lacks
_TIE_BITS = np.uint64(0x10000000)
_SIGN_SHIFT, _UINT64_TWO = np.uint64(1), np.uint64(2)
_MIN_NORMAL_F32 = np.uint64((0x381 << 53) - 2)  # twice the bits of 2**-126, minus two, as the code below compares
_SPLIT_FACTOR = np.float64(2**27 + 1)


def round_fraction(value: Fraction, rounding: str) -> float:
    """Rounds a nonzero rational number once, to a float64.  Overflow follows IEEE 754 for the rounding mode."""
    sign, magnitude = (-1 if value < 0 else 1), abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    last_exponent = max(exponent - _SIGNIFICAND_BITS + 1, _MIN_EXPONENT)
    scaled_value = magnitude / Fraction(2) ** last_exponent
    quotient, remainder = divmod(scaled_value.numerator, scaled_value.denominator)
    if remainder and _away(rounding, sign, quotient, 2 * remainder, scaled_value.denominator):
        quotient += 1
    if quotient * Fraction(2) ** last_exponent > _LARGEST_FLOAT64:
        return sign * math.inf if rounding == "rn" or _away(rounding, sign, 1, 1, 1) else sign * float(_LARGEST_FLOAT64)
    return sign * math.ldexp(quotient, last_exponent)


def _away(rounding: str, sign: int, whole: int, twice_rest: int, unit: int) -> bool:
    """Tells whether a rounding mode, such as `rn`, rounds a number away from zero.  The number has the sign `sign` and
    the integer part `whole`.  Its fractional part is `twice_rest / (2 * unit)`, and is not 0."""
    if rounding == "rn":
        return twice_rest > unit or (twice_rest == unit and whole % 2 == 1)
    return (rounding == "rp" and sign > 0) or (rounding == "rm" and sign < 0)


def exact_fma(a: float, b: float, c: float, rounding: str) -> float:
    """Returns `a * b + c`, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    exact_value = Fraction(a) * Fraction(b) + Fraction(c)
    if exact_value:
        return round_fraction(exact_value, rounding)
    is_negative = math.copysign(1.0, a) * math.copysign(1.0, b) < 0
    if is_negative == (math.copysign(1.0, c) < 0):
        return c
    return -0.0 if rounding == "rm" else 0.0


def exact_multiply(a: float, b: float, rounding: str) -> float:
    """Returns `a * b`, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return round_fraction(Fraction(a) * Fraction(b), rounding)


def exact_divide(a: float, b: float, rounding: str) -> float:
    """Returns `a / b`, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return float(np.float64(a) / np.float64(b))
    return round_fraction(Fraction(a) / Fraction(b), rounding)


def exact_square_root(a: float, rounding: str) -> float:
    """Returns the square root of `a`, rounded once.  Returns NaN if `a` is negative."""
    if not a > 0 or math.isinf(a):
        return float(np.sqrt(np.float64(a)))
    # Scaled so that the integer root has at least 64 bits; a last bit of one marks an inexact root.
    numerator, denominator = a.as_integer_ratio()
    scale_bits = 64 + denominator.bit_length()
    scaled_square = (numerator << (2 * scale_bits)) // denominator
    root = math.isqrt(scaled_square)
    is_inexact = root * root != scaled_square or scaled_square * denominator != numerator << (2 * scale_bits)
    return round_fraction(Fraction(2 * root + is_inexact, 2 << scale_bits), rounding)


def exact_lanes(function: Callable[..., float], rounding: str, *operands: Value) -> Value:
    """Calls `function` once per lane, with the lane's float64 operands and the rounding mode.  Returns the results."""
    operand_arrays = np.broadcast_arrays(*operands)
    values = [function(*lane, rounding) for lane in zip(*(x.ravel().tolist() for x in operand_arrays), strict=True)]
    return np.array(values, np.float64).reshape(operand_arrays[0].shape)[()]


def add(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a + b`."""
    exact_adder = lambda x, y, mode: exact_fma(x, 1.0, y, mode)
    return _rounded(np.add, exact_adder, lambda x, y: odd_sum(x, y, rounding), (a, b), rounding, ftz, sat)


def sub(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a - b`."""
    return add(a, -b, rounding, ftz, sat)


def mul(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a * b`."""
    return _rounded(np.multiply, exact_multiply, np.multiply, (a, b), rounding, ftz, sat)


def fma(a: Value, b: Value, c: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a * b + c`, rounded once.  PTX's `mad` of floats gives the same result."""
    rn_fma = fma_rn_f64 if a.itemsize == 8 else fma_rn_f32
    wide_fma = lambda x, y, z: odd_sum(x * y, z, rounding)
    return _rounded(rn_fma, exact_fma, wide_fma, (a, b, c), rounding, ftz, sat)


def div(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a / b`, correctly rounded."""
    # A quotient of two 24-bit numbers is a float32 or a tie, or differs from both by more than a float64's last bit.
    return _rounded(np.divide, exact_divide, np.divide, (a, b), rounding, ftz, sat)


def rcp(a: Value, rounding: str = "rn", ftz: bool = False) -> Value:
    """Computes `1 / a`, correctly rounded."""
    return div(a.dtype.type(1), a, rounding, ftz)


def sqrt(a: Value, rounding: str = "rn", ftz: bool = False) -> Value:
    """Computes the square root of `a`, correctly rounded.  Returns NaN if `a` is negative."""
    return _rounded(np.sqrt, exact_square_root, np.sqrt, (a,), rounding, ftz, False)


def _rounded(
    nearest: Callable[..., Value],
    exact: Callable[..., float],
    wide: Callable[..., Value],
    operands: Sequence[Value],
    rounding: str,
    ftz: bool,
    sat: bool,
) -> Value:
    """Computes one float instruction on `operands`.  Calls one of three functions:

    - `nearest`, for the rounding mode rn (to nearest).
    - `exact`, for another mode on float64 operands.  It computes one lane at a time.
    - `wide`, for another mode on float32 operands.  It computes in float64, and the result is then rounded to
    float32."""
    if ftz:
        operands = [flush(operand) for operand in operands]
    if rounding == "rn":
        result = nearest(*operands)
    else:
        check_rounding(rounding)
        if operands[0].itemsize == 8:
            result = exact_lanes(exact, rounding, *operands)
        else:
            result = narrow(wide(*(operand.astype(_F64) for operand in operands)), _F32, rounding)
    if ftz:
        result = flush(result)
    return saturate(result) if sat else result


def fma_rn_f32(a: Value, b: Value, c: Value) -> Value:
    """Computes `fma.rn.f32`: `a * b + c`, correctly rounded.

    The product is exact in float64.  The sum is rounded to float64 and then to float32.  The second rounding can be
    wrong only if the float64 sum is halfway between two float32 numbers.  Such sums are then rounded to odd."""
    product, addend = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    rounded_sum = product + addend
    bits = rounded_sum.view(np.uint64)
    # The bits of a tie of normal results end in a one and 28 zeros.  A denormal's tie bit lies elsewhere, so all
    # denormals count as ties.  Doubling the bits drops the sign; minus two, a zero wraps to the largest number.
    is_tie = ((bits & _EXTRA_F64_BITS) == _TIE_BITS) | ((bits << _SIGN_SHIFT) - _UINT64_TWO < _MIN_NORMAL_F32)
    if some(is_tie):
        rounded_sum = odd_sum(product, addend)
    return rounded_sum.astype(_F32)


def fma_rn_f64(a: Value, b: Value, c: Value) -> Value:
    """Computes `fma.rn.f64`: `a * b + c`, correctly rounded.

    Lanes that cannot overflow or underflow use error-free transformations and one rounding to odd (Boldo and Melquiond
    2008).  All other lanes use rational arithmetic."""
    product, product_error = _product_and_error(a, b)
    addend_sum, addend_error = _sum_and_error(c, product_error)
    rounded_sum, total_error = _sum_and_error(product, addend_sum)
    result = rounded_sum + odd_sum(addend_error, total_error)
    prod_size = np.abs(product)
    is_in_range = ((prod_size > 2.0**-900) | (a == 0) | (b == 0)) & (prod_size < 2.0**1000) & (np.abs(c) < 2.0**1000)
    is_in_range &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
    if full(is_in_range):
        # An exact zero takes the sign of the plain sum.
        return pick(result == 0, product + c, result)
    return _redone(exact_fma, ~is_in_range, pick(result == 0, product + c, result), a, b, c)


def _product_and_error(a: Value, b: Value) -> tuple[Value, Value]:
    """Returns the rounded product `a * b` and its rounding error (Dekker 1971)."""
    product = a * b
    a_high, b_high = _SPLIT_FACTOR * a, _SPLIT_FACTOR * b
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _sum_and_error(a: Value, b: Value) -> tuple[Value, Value]:
    """Returns the rounded sum `a + b` and its rounding error (Knuth's TwoSum)."""
    rounded_sum = a + b
    recovered_b = rounded_sum - a
    return rounded_sum, (a - (rounded_sum - recovered_b)) + (b - recovered_b)


def _redone(function: Callable[..., float], where: Value, result: Value, *operands: Value) -> Value:
    """Recomputes the lanes in the mask `where` with `function`, rounded to nearest. Returns a copy of `result` with the
    new values."""
    if not np.ndim(result):
        return exact_lanes(function, "rn", *operands)
    lane_operands = [np.broadcast_to(operand, result.shape)[where] for operand in operands]
    corrected_result = result.copy()
    corrected_result[where] = exact_lanes(function, "rn", *lane_operands)
    return corrected_result


def fmin(
    a: Value, b: Value, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False, absolute: bool = False
) -> Value:
    """Runs PTX's `min`.  -0 is less than +0.  A NaN operand is ignored if the other operand is a number.

    With `nan`, any NaN operand makes the result the canonical NaN.  `absolute` compares magnitudes.  `xorsign_abs` also
    does so, and gives the result the exclusive or of the operands' signs."""
    return _extreme(np.fmin, np.minimum, np.bitwise_or, a, b, ftz, nan, xorsign_abs, absolute)


def fmax(
    a: Value, b: Value, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False, absolute: bool = False
) -> Value:
    """Runs `max`, with the same rules and modifiers as `fmin`."""
    return _extreme(np.fmax, np.maximum, np.bitwise_and, a, b, ftz, nan, xorsign_abs, absolute)


def _extreme(
    number: Callable[..., Value],
    strict: Callable[..., Value],
    zeros: Callable[..., Value],
    a: Value,
    b: Value,
    ftz: bool,
    nan: bool,
    xorsign_abs: bool,
    absolute: bool,
) -> Value:
    if ftz:
        a, b = flush(a), flush(b)
    sign = unsigned(a) ^ unsigned(b) if xorsign_abs else None
    if xorsign_abs or absolute:
        a, b = np.abs(a), np.abs(b)
    result = canonical(strict(a, b)) if nan else number(a, b)
    if not full(result):
        # NumPy may return either of two zeros; the bits of equal operands decide.
        signed_zeros = zeros(unsigned(a), unsigned(b)).view(result.dtype)
        result = pick((result == 0) & (a == b), signed_zeros, result)
    if sign is None:
        return result
    return pick(result != result, result, with_sign(result, sign))


def fabs(a: Value, ftz: bool = False) -> Value:
    """Runs `abs`: returns the magnitude of `a`."""
    return np.abs(flush(a) if ftz else a)


def fneg(a: Value, ftz: bool = False) -> Value:
    """Runs `neg`: returns `a` with the opposite sign."""
    return -(flush(a) if ftz else a)


def copysign(a: Value, b: Value) -> Value:
    """Runs `copysign`: returns `b` with the sign of `a`.  The operands have PTX's order."""
    return with_sign(b, unsigned(a))


def testp(a: Value, property: str) -> Value:
    """Runs `testp`: returns whether the number `a` has the property `property`.

    `property` is `finite`, `infinite`, `number`, `notanumber`, `normal` or `subnormal`.  Zeros are normal.  Any other
    name raises `ValueError`."""
    if property not in _TEST_BY_PROPERTY:
        raise ValueError(f"property: expected one of {', '.join(_TEST_BY_PROPERTY)}, got {property!r}")
    return _TEST_BY_PROPERTY[property](a)


def _subnormal(a: Value) -> Value:
    return (np.abs(a) < np.finfo(a.dtype).tiny) & (a != 0)


_TEST_BY_PROPERTY: dict[str, Callable[[Value], Value]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": lambda a: a != a,
    "normal": lambda a: np.isfinite(a) & ~_subnormal(a),
    "subnormal": _subnormal,
}
