"""Computes PTX's `.approx` and `.full` instructions on float32: in float64, with the result rounded to float32.

Each function gives the error bound of PTX ISA 8.7.  The hardware may differ in the last bits.  With `ftz`, denormal
operands and results become zeros of the same sign.  Operands and results are float32, unless the function's name says
f64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rooflab.bench.emulator.numbers.bits import Value, flush, pick, some, with_sign

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_MAX_DIVISOR = np.float32(2.0**126)
_HIGH_WORD = np.uint64(0xFFFFFFFF00000000)
_F64_EXPONENT, _F64_SIGN = np.uint64(0x7FF0000000000000), np.uint64(0x8000000000000000)
_F64_NAN = np.uint64(0x7FFFFFFF00000000)


def _through(function: Callable[[Value], Value]) -> Callable[..., Value]:
    def run(a: Value, ftz: bool = False) -> Value:
        if ftz:
            a = flush(a)
        rounded_result = function(a.astype(_F64)).astype(_F32)
        return flush(rounded_result) if ftz else rounded_result

    return run


ex2 = _through(np.exp2)
"""Returns `2**a`.  The hardware's error is at most 2 ulp, relative to the correctly rounded result."""
lg2 = _through(np.log2)
"""Returns `log2(a)`; NaN if `a < 0`.  The hardware's error is 2**-22: absolute for `0.5 < a < 2`, else relative."""
sin, cos = _through(np.sin), _through(np.cos)
"""Return the sine and the cosine of `a`, in radians.  The hardware's absolute error is 2**-20.5 up to
`abs(a) = 2 * pi`, and 2**-14.7 up to `abs(a) = 100 * pi`."""
tanh = _through(np.tanh)
"""Returns `tanh(a)`.  The hardware's relative error is 2**-11."""
rsqrt = _through(lambda x: 1 / np.sqrt(x))
"""Returns `1 / sqrt(a)`.  For -0 the result is minus infinity.  The hardware's relative error is 2**-22.9."""


def div(a: Value, b: Value, ftz: bool = False) -> Value:
    """Returns `a / b`, as `div.approx`.  The hardware's error is at most 2 ulp if `abs(b)` is in [2**-126, 2**126].

    As on the hardware, `abs(b)` above 2**126 gives a zero with the quotient's sign, or NaN if `a` is infinite."""
    if ftz:
        a, b = flush(a), flush(b)
    quotient = a / b
    is_large_divisor = np.isfinite(b) & (np.abs(b) > _MAX_DIVISOR)
    if some(is_large_divisor):
        signed_zero = with_sign(np.zeros_like(quotient)[()], a.view(np.uint32) ^ b.view(np.uint32))
        # The hardware multiplies the infinite a by the reciprocal of b, which is 0.
        quotient = pick(is_large_divisor, pick(np.isfinite(a), signed_zero, np.float32(np.nan)), quotient)
    return flush(quotient) if ftz else quotient


def rcp_ftz_f64(a: Value) -> Value:
    """Returns `1 / a` in float64 (`rcp.approx.ftz.f64`).  Only the upper 32 bits of `a` and of the result are used.

    PTX states no error bound for this instruction.  Code that uses the instruction refines the result."""
    return _upper_words(lambda x: 1 / x, a)


def rsqrt_ftz_f64(a: Value) -> Value:
    """Returns `1 / sqrt(a)` (`rsqrt.approx.ftz.f64`).  Only the upper 32 bits of `a` and of the result are used."""
    return _upper_words(lambda x: 1 / np.sqrt(x), a)


def rsqrt_f64(a: Value) -> Value:
    """Returns `1 / sqrt(a)` (`rsqrt.approx.f64`).  Rounds the root, then `1 / root`.  PTX states no error bound."""
    return 1 / np.sqrt(a)


def _upper_words(function: Callable[[Value], Value], a: Value) -> Value:
    double_result = function(_flushed(a.view(np.uint64) & _HIGH_WORD).view(np.float64))
    result_bits = _flushed(double_result.view(np.uint64) & _HIGH_WORD)
    return pick(double_result != double_result, _F64_NAN, result_bits).view(np.float64)


def _flushed(bits: Value) -> Value:
    return pick((bits & _F64_EXPONENT) != 0, bits, bits & _F64_SIGN)
