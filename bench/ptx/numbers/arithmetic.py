"""Float32 and float64 arithmetic of PTX: add, sub, mul, fma, div, rcp and sqrt with rounding modes, `.ftz` and `.sat`.

PTX ISA 8.7, section "Floating Point Instructions".  Operands are of one float type, which is the result's.  A NaN that
an operation makes keeps the bits that NumPy gives it: PTX leaves them open.  `.ftz` applies to float32 alone.
Every function with a `rounding` raises `ValueError` on a mode that PTX lacks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rooflab.bench.ptx.numbers import exact
from rooflab.bench.ptx.numbers.bits import Value, full, pick, some
from rooflab.bench.ptx.numbers.rounding import check_rounding, flush, narrow, odd_sum, saturate

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_BEYOND_F32 = np.uint64(0x1FFFFFFF)  # the bits of a float64 that a normal float32 lacks
_TIE = np.uint64(0x10000000)
_SIGN, _TWO = np.uint64(1), np.uint64(2)
_NORMAL_F32 = np.uint64((0x381 << 53) - 2)  # 2**-126 without its sign, less two as compared below
_SPLIT = np.float64(2**27 + 1)


def add(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """a + b."""
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "rn":
        return _finished(a + b, ftz, sat)
    check_rounding(rounding)
    if a.itemsize == 8:
        return _finished(exact.lanes(exact.fma, rounding, a, np.float64(1), b), ftz, sat)
    total = odd_sum(a.astype(_F64), b.astype(_F64), rounding)
    return _finished(narrow(total, _F32, rounding), ftz, sat)


def sub(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """a - b."""
    return add(a, -b, rounding, ftz, sat)


def mul(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """a * b."""
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "rn":
        return _finished(a * b, ftz, sat)
    check_rounding(rounding)
    if a.itemsize == 8:
        return _finished(exact.lanes(exact.multiply, rounding, a, b), ftz, sat)
    return _finished(narrow(a.astype(_F64) * b.astype(_F64), _F32, rounding), ftz, sat)


def fma(a: Value, b: Value, c: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """a * b + c, rounded once; `mad` of floats is the same."""
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    if rounding == "rn":
        return _finished((fma_rn_f64 if a.itemsize == 8 else fma_rn_f32)(a, b, c), ftz, sat)
    check_rounding(rounding)
    if a.itemsize == 8:
        return _finished(exact.lanes(exact.fma, rounding, a, b, c), ftz, sat)
    total = odd_sum(a.astype(_F64) * b.astype(_F64), c.astype(_F64), rounding)
    return _finished(narrow(total, _F32, rounding), ftz, sat)


def div(a: Value, b: Value, rounding: str = "rn", ftz: bool = False, sat: bool = False) -> Value:
    """a / b, correctly rounded."""
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "rn":
        return _finished(a / b, ftz, sat)
    check_rounding(rounding)
    if a.itemsize == 8:
        return _finished(exact.lanes(exact.divide, rounding, a, b), ftz, sat)
    # A quotient of two 24-bit numbers is a float32 or a tie, or lies farther from any than a float64's last bit.
    return _finished(narrow(a.astype(_F64) / b.astype(_F64), _F32, rounding), ftz, sat)


def rcp(a: Value, rounding: str = "rn", ftz: bool = False) -> Value:
    """1 / a, correctly rounded."""
    return div(a.dtype.type(1), a, rounding, ftz)


def sqrt(a: Value, rounding: str = "rn", ftz: bool = False) -> Value:
    """The square root, correctly rounded; NaN where a is negative."""
    if ftz:
        a = flush(a)
    if rounding == "rn":
        return np.sqrt(a)
    check_rounding(rounding)
    if a.itemsize == 8:
        return exact.lanes(exact.square_root, rounding, a)
    return narrow(np.sqrt(a.astype(_F64)), _F32, rounding)


def _finished(result: Value, ftz: bool, sat: bool) -> Value:
    if ftz:
        result = flush(result)
    return saturate(result) if sat else result


def fma_rn_f32(a: Value, b: Value, c: Value) -> Value:
    """`fma.rn.f32`: correctly rounded.

    The product is exact in float64 and the sum rounds to float64 first, which only shows where that is a tie of
    float32; those lanes are done again by rounding to odd.
    """
    product, addend = a.astype(_F64) * b.astype(_F64), c.astype(_F64)
    total = product + addend
    bits = total.view(np.uint64)
    # Ties of normal results end in a one and 28 zeros; a denormal's lie elsewhere, so all denormals count as ties.
    # Doubling drops the sign, and zeros wrap to the largest number when two is taken off.
    tie = ((bits & _BEYOND_F32) == _TIE) | ((bits << _SIGN) - _TWO < _NORMAL_F32)
    if some(tie):
        total = odd_sum(product, addend)
    return total.astype(_F32)


def fma_rn_f64(a: Value, b: Value, c: Value) -> Value:
    """`fma.rn.f64`: correctly rounded.

    Error-free transformations and one rounding to odd (Boldo and Melquiond 2008) where nothing can overflow or
    underflow, rational arithmetic in the other lanes.
    """
    product, below = _exact_product(a, b)
    high, low = _exact_sum(c, below)
    total, rest = _exact_sum(product, high)
    result = total + odd_sum(low, rest)
    size = np.abs(product)
    safe = ((size > 2.0**-900) | (a == 0) | (b == 0)) & (size < 2.0**1000) & (np.abs(c) < 2.0**1000)
    safe &= (np.abs(a) < 2.0**990) & (np.abs(b) < 2.0**990)
    if full(safe):
        # An exact zero has the sign of the plain sum.
        return pick(result == 0, product + c, result)
    return _redone(exact.fma, ~safe, pick(result == 0, product + c, result), a, b, c)


def _exact_product(a: Value, b: Value) -> tuple[Value, Value]:
    """The product and what its rounding left out (Dekker 1971)."""
    product = a * b
    a_high, b_high = _SPLIT * a, _SPLIT * b
    a_high, b_high = a_high - (a_high - a), b_high - (b_high - b)
    a_low, b_low = a - a_high, b - b_high
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _exact_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """The sum and what its rounding left out (Knuth's TwoSum)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _redone(function: Callable[..., float], where: Value, result: Value, *operands: Value) -> Value:
    """`result` with the lanes of `where` computed again, to nearest, by a function of single floats."""
    if not np.ndim(result):
        return exact.lanes(function, "rn", *operands)
    rows = [np.broadcast_to(x, result.shape)[where] for x in operands]
    again = result.copy()
    again[where] = exact.lanes(function, "rn", *rows)
    return again
