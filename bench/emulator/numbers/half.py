"""Computes f16 and bf16 arithmetic, single and packed: add, sub, mul, fma, min, max, abs, neg, ex2, tanh.

The source is PTX ISA 8.7, section "Half Precision Floating Point Instructions".  `kind` is "f16" or "bf16".  Operands
are raw bits: a uint16 is one number, a uint32 a packed pair.  Each result is rounded once, to nearest.

`.ftz` replaces denormals by zeros.  `.sat` clamps to [0, 1] and turns NaN into +0.  `.relu` turns negative values into
+0.  Computed NaNs are 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rooflab.bench.emulator.numbers import floats
from rooflab.bench.emulator.numbers.bits import Value, full, odd_sum, parts, pick, rectify, saturate, whole
from rooflab.bench.emulator.numbers.formats import decode, encode, get_format

_SIGN_BIT, _MAGNITUDE_MASK = np.uint16(0x8000), np.uint16(0x7FFF)


def add(a: Value, b: Value, kind: str, ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a + b`."""
    # A float32 has at least 2 p + 2 bits for the p bits of either format: first rounding to float32 changes no result.
    return _each(lambda x, y: x + y, kind, ftz, sat, a, b)


def sub(a: Value, b: Value, kind: str, ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a - b`."""
    return _each(lambda x, y: x - y, kind, ftz, sat, a, b)


def mul(a: Value, b: Value, kind: str, ftz: bool = False, sat: bool = False) -> Value:
    """Computes `a * b`."""
    # Products are exact in float32, except products of bf16 below 2**-135, a quarter of bf16's smallest number.
    return _each(lambda x, y: x * y, kind, ftz, sat, a, b)


def fma(a: Value, b: Value, c: Value, kind: str, ftz: bool = False, sat: bool = False, relu: bool = False) -> Value:
    """Computes `a * b + c`."""

    def fused(x: Value, y: Value, z: Value) -> Value:
        product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
        # The exponents of f16 are so close that a float64 sum never becomes a tie; the exponents of bf16 are not.
        wide_sum = product + addend if kind == "f16" else odd_sum(product, addend)
        return rectify(wide_sum) if relu else wide_sum

    return _each(fused, kind, ftz, sat, a, b, c)


def fmin(a: Value, b: Value, kind: str, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False) -> Value:
    """Runs `min`, with the modifiers of `floats.fmin`."""
    return _each(lambda x, y: floats.fmin(x, y, False, nan, xorsign_abs), kind, ftz, False, a, b)


def fmax(a: Value, b: Value, kind: str, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False) -> Value:
    """Runs `max`, with the modifiers of `floats.fmax`."""
    return _each(lambda x, y: floats.fmax(x, y, False, nan, xorsign_abs), kind, ftz, False, a, b)


def ex2(a: Value, kind: str, ftz: bool = False) -> Value:
    """Runs `ex2.approx`: computes `2**a`, rounded once.

    The hardware's result may have other bits.  Its relative error is at most 2**-9.9 for f16 and 2**-7 for bf16 (PTX
    ISA 8.7, "ex2")."""
    return _each(lambda x: np.exp2(x.astype(np.float64)), kind, ftz, False, a)


def tanh(a: Value, kind: str) -> Value:
    """Runs `tanh.approx`: computes `tanh(a)`, rounded once.

    The hardware's result may have other bits.  Its absolute error is at most 2**-10.987 for f16 and 2**-8 for bf16 (PTX
    ISA 8.7, "tanh")."""
    return _each(lambda x: np.tanh(x.astype(np.float64)), kind, False, False, a)


def absolute(a: Value, kind: str, ftz: bool = False) -> Value:
    """Runs `abs`: clears the sign bit."""
    return _raw(lambda x: x & _MAGNITUDE_MASK, kind, ftz, a)


def negative(a: Value, kind: str, ftz: bool = False) -> Value:
    """Runs `neg`: inverts the sign bit."""
    return _raw(lambda x: x ^ _SIGN_BIT, kind, ftz, a)


def flush(codes: Value, kind: str) -> Value:
    """Replaces each denormal by a zero of the same sign.  `codes` and the result are the bits of numbers (uint16)."""
    float_format = get_format(kind)
    is_normal = (codes & np.uint16(float_format.overflow)) != 0
    return codes if full(is_normal) else pick(is_normal, codes, codes & _SIGN_BIT)


def _each(function: Callable[..., Value], kind: str, ftz: bool, sat: bool, *operands: Value) -> Value:
    is_packed = operands[0].itemsize == 4
    codes = [parts(x, np.uint16) for x in operands] if is_packed else [x.view(np.uint16) for x in operands]
    if ftz:
        codes = [flush(x, kind) for x in codes]
    function_result = function(*(decode(x, kind) for x in codes))
    result_codes = encode(saturate(function_result) if sat else function_result, kind)
    if ftz:
        result_codes = flush(result_codes, kind)
    return whole(result_codes, np.uint32) if is_packed else result_codes


def _raw(function: Callable[[Value], Value], kind: str, ftz: bool, a: Value) -> Value:
    codes = parts(a, np.uint16) if a.itemsize == 4 else a.view(np.uint16)
    function_result = function(flush(codes, kind) if ftz else codes)
    return whole(function_result, np.uint32) if a.itemsize == 4 else function_result
