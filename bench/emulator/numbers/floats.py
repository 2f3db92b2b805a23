"""Implements PTX's float instructions: add, sub, mul, fma, div, rcp, sqrt, min, max, abs, neg, copysign, testp.

The source is PTX ISA 8.7, section "Floating Point Instructions".  Operands and result have the same type, float32 or
float64.  `.ftz` applies to float32 alone.  A NaN result has NumPy's bits, because PTX does not specify them.  Raises
`ValueError` on a rounding mode that PTX does not have.

In other modes than rn the processor itself rounds, in that mode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from rooflab.bench.emulator.numbers.bits import (
    LIBM,
    Value,
    canonical,
    flush,
    full,
    odd_sum,
    pick,
    rounding_to,
    saturate,
    some,
    sum_and_error,
    unsigned,
    with_sign,
)

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_EXTRA_F64_BITS = np.uint64(0x1FFFFFFF)  # the bits of a float64 that a normal float32 lacks
_TIE_BITS = np.uint64(0x10000000)
_SIGN_SHIFT, _UINT64_TWO = np.uint64(1), np.uint64(2)
_MIN_NORMAL_F32 = np.uint64((0x381 << 53) - 2)  # twice the bits of 2**-126, minus two, as the code below compares
_SPLIT_FACTOR = np.float64(2**27 + 1)
LIBM.fma.argtypes, LIBM.fma.restype = [ctypes.c_double] * 3, ctypes.c_double
_FMA_OF_LANES = np.frompyfunc(LIBM.fma, 3, 1)


def _rounded(nearest: Callable[..., Value], directed: Callable[..., Value] | None = None) -> Callable[..., Value]:
    """Returns the function of one float instruction.  It takes operands, and the modifiers `rounding`, `ftz` and `sat`.

    `nearest` computes in the mode rn.  `directed`, by default the same function, computes in the other modes, which the
    processor is then in."""

    def run(*operands: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
        if ftz:
            operands = tuple(flush(operand) for operand in operands)
        if rounding == "rn":
            result = nearest(*operands)
        else:
            with rounding_to(rounding):
                result = (directed or nearest)(*operands)
        if ftz:
            result = flush(result)
        return saturate(result) if sat else result

    return run


def _fma_directed(a: Value, b: Value, c: Value) -> Value:
    if a.itemsize == 8:
        return _fma_of_lanes(a, b, c)
    # The product is exact in float64, and to round twice in one direction is to round once.
    return (a.astype(_F64) * b.astype(_F64) + c.astype(_F64)).astype(_F32)


def _fma_of_lanes(a: Value, b: Value, c: Value) -> Value:
    """Computes `a * b + c` of float64, rounded once, at 0.3 us a lane."""
    return np.asarray(_FMA_OF_LANES(a, b, c), np.float64)[()]


add, sub, mul, div, sqrt = map(_rounded, (np.add, np.subtract, np.multiply, np.divide, np.sqrt))
"""Functions of one instruction each, correctly rounded.  The square root of a negative number is NaN."""
fabs, fneg = map(_rounded, (np.abs, np.negative))
"""Run `abs` and `neg`: return the magnitude of `a`, and `a` with the opposite sign."""
fma = _rounded(lambda a, b, c: (fma_rn_f64 if a.itemsize == 8 else fma_rn_f32)(a, b, c), _fma_directed)
"""Computes `a * b + c`, rounded once.  PTX's `mad` of floats gives the same result."""


def rcp(a: Value, rounding: str = "rn", ftz: bool = False) -> Value:
    """Computes `1 / a`, correctly rounded."""
    return div(a.dtype.type(1), a, rounding=rounding, ftz=ftz)


def fma_rn_f32(a: Value, b: Value, c: Value) -> Value:
    """Computes `fma.rn.f32`: `a * b + c`, correctly rounded.

    The product is exact in float64.  The sum is rounded to float64 and then to float32.  The second rounding can be
    wrong only if the float64 sum is halfway between two float32 numbers.  Then the float64
    sum is rounded to odd instead, which makes the second rounding right."""
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
    2008).  All other lanes use the processor's own."""
    product, product_error = _product_and_error(a, b)
    addend_sum, addend_error = sum_and_error(c, product_error)
    rounded_sum, total_error = sum_and_error(product, addend_sum)
    result = rounded_sum + odd_sum(addend_error, total_error)
    prod_size = np.abs(product)
    is_in_range = ((prod_size > 2.0**-900) | (a == 0) | (b == 0)) & (prod_size < 2.0**1000) & (np.abs(c) < 2.0**1000)
    is_in_range &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
    result = pick(result == 0, product + c, result)  # an exact zero takes the sign of the plain sum
    return result if full(is_in_range) else pick(is_in_range, result, _fma_of_lanes(a, b, c))


def _product_and_error(a: Value, b: Value) -> tuple[Value, Value]:
    """Returns the rounded product `a * b` and its rounding error (Dekker 1971)."""
    product = a * b
    a_high, b_high = _SPLIT_FACTOR * a, _SPLIT_FACTOR * b
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _extreme(
    number: Callable[..., Value], strict: Callable[..., Value], zeros: Callable[..., Value]
) -> Callable[..., Value]:
    def run(a: Value, b: Value, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False) -> Value:
        if ftz:
            a, b = flush(a), flush(b)
        sign = unsigned(a) ^ unsigned(b) if xorsign_abs else None
        if xorsign_abs:
            a, b = np.abs(a), np.abs(b)
        result = canonical(strict(a, b)) if nan else number(a, b)
        if not full(result):
            # NumPy may return either of two zeros; the bits of equal operands decide.
            signed_zeros = zeros(unsigned(a), unsigned(b)).view(result.dtype)
            result = pick((result == 0) & (a == b), signed_zeros, result)
        if sign is None:
            return result
        return pick(result != result, result, with_sign(result, sign))

    return run


fmin = _extreme(np.fmin, np.minimum, np.bitwise_or)
"""Runs PTX's `min`.  -0 is less than +0.  A NaN operand is ignored if the other operand is a number.

With `nan`, any NaN operand makes the result the canonical NaN.  `xorsign_abs` compares magnitudes, and gives the result
the exclusive or of the operands' signs."""
fmax = _extreme(np.fmax, np.maximum, np.bitwise_and)
"""Runs `max`, with the same rules and modifiers as `fmin`."""


def copysign(a: Value, b: Value) -> Value:
    """Runs `copysign`: returns `b` with the sign of `a`.  The operands have PTX's order."""
    return with_sign(b, unsigned(a))


def _subnormal(a: Value) -> Value:
    return (np.abs(a) < np.finfo(a.dtype).tiny) & (a != 0)


TESTS: dict[str, Callable[[Value], Value]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": lambda a: a != a,
    "normal": lambda a: np.isfinite(a) & ~_subnormal(a),
    "subnormal": _subnormal,
}
"""By property of a number, the function that tests for it (`testp`).  Zeros are normal."""
