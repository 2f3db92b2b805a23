"""Computes f16 and bf16 arithmetic, single and packed: add, sub, mul, fma, min, max, abs, neg, ex2, tanh.

The source is PTX ISA 8.7, section "Half Precision Floating Point Instructions".  `kind` is "f16" or "bf16".  Operands
are raw bits: a uint16 is one number, a uint32 a packed pair.  Each result is rounded once, to nearest.

`.ftz` replaces denormals by zeros.  `.sat` clamps to [0, 1] and turns NaN into +0.  `.relu` turns negative values into
+0.  Computed NaNs are 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rooflab.bench.emulator.numbers import floats
from rooflab.bench.emulator.numbers.bits import Value, full, odd_sum, parts, pick, rectify, saturate, whole
from rooflab.bench.emulator.numbers.formats import decode, encode, get_format

_SIGN_BIT, _MAGNITUDE_MASK = np.uint16(0x8000), np.uint16(0x7FFF)


def _each(function: Callable[..., Value]) -> Callable[..., Value]:
    """Returns a function of raw bits and their kind.  It calls `function` on float32, and rounds the result once."""

    def run(*arguments: Any, ftz: bool = False, sat: bool = False, **modifiers: bool) -> Value:
        *operands, kind = arguments
        function_result = function(*(decode(_codes(x, kind, ftz), kind) for x in operands), **modifiers)
        result_codes = encode(saturate(function_result) if sat else function_result, kind)
        return _joined(flush(result_codes, kind) if ftz else result_codes, operands[0])

    return run


def _codes(x: Value, kind: str, ftz: bool) -> Value:
    codes = parts(x, np.uint16) if x.itemsize == 4 else x.view(np.uint16)
    return flush(codes, kind) if ftz else codes


def _joined(codes: Value, operand: Value) -> Value:
    return whole(codes, np.uint32) if operand.itemsize == 4 else codes


# A float32 has at least 2 p + 2 bits for the p bits of either format: first rounding to float32 changes no sum.
# Products are exact in float32, except products of bf16 below 2**-135, a quarter of bf16's smallest number.
add, sub, mul = map(_each, (np.add, np.subtract, np.multiply))
fmin, fmax = _each(floats.fmin), _each(floats.fmax)
"""Run `min` and `max`, with the modifiers of `floats.fmin`."""
ex2 = _each(lambda x: np.exp2(x.astype(np.float64)))
"""Runs `ex2.approx`: computes `2**a`, rounded once.  The hardware's result may have other bits.  Its relative error is
at most 2**-9.9 for f16 and 2**-7 for bf16 (PTX ISA 8.7, "ex2")."""
tanh = _each(lambda x: np.tanh(x.astype(np.float64)))
"""Runs `tanh.approx`: computes `tanh(a)`, rounded once.  The hardware's result may have other bits.  Its absolute error
is at most 2**-10.987 for f16 and 2**-8 for bf16 (PTX ISA 8.7, "tanh")."""


def fma(a: Value, b: Value, c: Value, kind: str, ftz: bool = False, sat: bool = False, relu: bool = False) -> Value:
    """Computes `a * b + c`."""

    def fused(x: Value, y: Value, z: Value) -> Value:
        product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
        # The exponents of f16 are so close that a float64 sum never becomes a tie; the exponents of bf16 are not.
        wide_sum = product + addend if kind == "f16" else odd_sum(product, addend)
        return rectify(wide_sum) if relu else wide_sum

    return _each(fused)(a, b, c, kind, ftz=ftz, sat=sat)


def fabs(a: Value, kind: str, ftz: bool = False) -> Value:
    """Runs `abs`: clears the sign bit."""
    return _joined(_codes(a, kind, ftz) & _MAGNITUDE_MASK, a)


def fneg(a: Value, kind: str, ftz: bool = False) -> Value:
    """Runs `neg`: inverts the sign bit."""
    return _joined(_codes(a, kind, ftz) ^ _SIGN_BIT, a)


def flush(codes: Value, kind: str) -> Value:
    """Replaces each denormal by a zero of the same sign.  `codes` and the result are the bits of numbers (uint16)."""
    float_format = get_format(kind)
    is_normal = (codes & np.uint16(float_format.overflow)) != 0
    return codes if full(is_normal) else pick(is_normal, codes, codes & _SIGN_BIT)
