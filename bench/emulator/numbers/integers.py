"""Integer arithmetic of PTX: products, quotients, extremes, absolute values, shifts, byte products, carries.

PTX ISA 8.7, sections "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic Instructions" and "Logic
and Shift Instructions".  The NumPy type of the operands says whether an instruction is signed (`.s32` is int32).  The
result has the same type unless the function says otherwise.  Results wrap around.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rooflab.bench.emulator.numbers.bits import SIGNED, UNSIGNED, Value, is_signed, parts, pick, some, unsigned, whole

_LOW_WORD, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
_NONE = np.bool_(False)


def mul_wide(a: Value, b: Value) -> Value:
    """`mul.wide`: the product of two 16- or 32-bit integers, with twice as many bits."""
    wide = (SIGNED if is_signed(a) else UNSIGNED)[2 * a.itemsize]
    return a.astype(wide) * b.astype(wide)


def mul_hi(a: Value, b: Value) -> Value:
    """`mul.hi`: the upper half of the product of 16-, 32- or 64-bit integers."""
    if a.itemsize < 8:
        return (mul_wide(a, b) >> (8 * a.itemsize)).astype(a.dtype)
    high = _upper_u64(unsigned(a), unsigned(b))
    if not is_signed(a):
        return high
    # As unsigned, a negative operand is 2**64 too large: subtract the other operand from the upper half.
    high = high - (unsigned(a >> 63) & unsigned(b)) - (unsigned(b >> 63) & unsigned(a))
    return high.view(np.int64)


def _upper_u64(a: Value, b: Value) -> Value:
    """The upper 64 bits of the product of two uint64, from four products of their 32-bit halves."""
    a_low, a_high, b_low, b_high = a & _LOW_WORD, a >> _WORD, b & _LOW_WORD, b >> _WORD
    middle = a_high * b_low + ((a_low * b_low) >> _WORD)
    other = a_low * b_high + (middle & _LOW_WORD)
    return a_high * b_high + (middle >> _WORD) + (other >> _WORD)


def mad_hi(a: Value, b: Value, c: Value, sat: bool = False) -> Value:
    """`mad.hi`: the upper half of `a * b`, plus `c`; `sat`, for int32 alone, clamps the sum instead of wrapping."""
    return add_sat_s32(mul_hi(a, b), c) if sat else mul_hi(a, b) + c


def mul24(a: Value, b: Value, high: bool = False) -> Value:
    """`mul24`: bits 31 to 0 of the product of the low 24 bits of 32-bit integers; with `high` bits 47 to 16."""
    wide = (SIGNED if is_signed(a) else UNSIGNED)[8]
    a, b = (((x << 8) >> 8).astype(wide) for x in (a, b))
    product = a * b
    return (
        ((product >> 16) if high else product).astype(UNSIGNED[4]).view(SIGNED[4] if wide == SIGNED[8] else UNSIGNED[4])
    )


def mad24(a: Value, b: Value, c: Value, high: bool = False, sat: bool = False) -> Value:
    """`mad24`: the result of `mul24`, plus `c`; `sat`, for int32 alone, clamps the sum."""
    product = mul24(a, b, high)
    return add_sat_s32(product, c) if sat else product + c


def add_sat_s32(a: Value, b: Value) -> Value:
    """`add.sat.s32`: the sum of two int32, clamped to the range of int32."""
    return _clamped(a.astype(np.int64) + b.astype(np.int64))


def sub_sat_s32(a: Value, b: Value) -> Value:
    """`sub.sat.s32`: the difference of two int32, clamped to the range of int32."""
    return _clamped(a.astype(np.int64) - b.astype(np.int64))


def _clamped(x: Value) -> Value:
    return np.minimum(np.maximum(x, -(2**31)), 2**31 - 1).astype(np.int32)


def sad(a: Value, b: Value, c: Value) -> Value:
    """`sad`: `c + |a - b|`."""
    return c + (np.maximum(a, b) - np.minimum(a, b))


def div(a: Value, b: Value) -> Value:
    """`div`: the quotient, truncated; if `b` is 0, all bits of the result are set (PTX leaves this result open)."""
    zero = b == 0
    if not is_signed(a):
        quotient = a // b
    else:
        size = unsigned(np.abs(a)) // unsigned(np.abs(b))
        quotient = pick((a ^ b) < 0, np.negative(size), size).view(a.dtype)
    return pick(zero, ~a.dtype.type(0), quotient) if some(zero) else quotient


def rem(a: Value, b: Value) -> Value:
    """`rem`: the remainder of `div`, with the sign of `a`; if `b` is 0, all bits are set (PTX leaves this open)."""
    zero = b == 0
    if not is_signed(a):
        rest = a % b
    else:
        size = unsigned(np.abs(a)) % unsigned(np.abs(b))
        rest = pick(a < 0, np.negative(size), size).view(a.dtype)
    return pick(zero, ~a.dtype.type(0), rest) if some(zero) else rest


def imin(a: Value, b: Value, relu: bool = False) -> Value:
    """Runs `min`; with `relu` a negative result becomes 0."""
    result = np.minimum(a, b)
    return np.maximum(result, 0) if relu else result


def imax(a: Value, b: Value, relu: bool = False) -> Value:
    """Runs `max`; with `relu` a negative result becomes 0."""
    result = np.maximum(a, b)
    return np.maximum(result, 0) if relu else result


def pairs(function: Callable[..., Value], a: Value, b: Value, dtype: np.dtype, *more: bool) -> Value:
    """Applies `function`, with `more`, to both 16-bit halves (of type `dtype`) of packed pairs (uint32)."""
    return whole(function(parts(a, dtype), parts(b, dtype), *more), np.uint32)


def shl(a: Value, count: Value) -> Value:
    """`shl`: shifts in zeros; the result is 0 if `count`, a uint32, is the width or more."""
    # NumPy defines shifts by the width and more, in the type that both operands promote to.
    shifted = unsigned(a) << count
    return shifted.astype(UNSIGNED[a.itemsize], copy=False).view(a.dtype)


def shr(a: Value, count: Value) -> Value:
    """`shr`: shifts in zeros, or the sign of a signed integer; `count`, a uint32, may be the width or more."""
    if is_signed(a) and a.itemsize == 4:
        # As int32 a count from 2**31 on is negative, which NumPy also treats as too large; int64 would cost two casts.
        return a >> count.view(np.int32)
    return (a >> count).astype(a.dtype, copy=False)


def shf(low: Value, high: Value, count: Value, left: bool, clamp: bool) -> Value:
    """`shf.l`: the upper word of the uint32 pair shifted left.  `shf.r`: the lower word of the pair shifted right.

    `count` is taken modulo 32 (`.wrap`); with `clamp` a larger `count` is taken as 32.
    """
    count = np.minimum(count, np.uint32(32)) if clamp else count & np.uint32(31)
    back = np.uint32(32) - count
    return (high << count) | (low >> back) if left else (high << back) | (low >> count)


def dp4a(a: Value, b: Value, c: Value, a_signed: bool, b_signed: bool) -> Value:
    """`dp4a`: `c` plus the sum of the products of four bytes; `a`, `b`, `c` and the result are uint32 (bits)."""
    return unsigned(c) + _dot(_wide_parts(a, 1, a_signed), _wide_parts(b, 1, b_signed))


def dp2a(a: Value, b: Value, c: Value, a_signed: bool, b_signed: bool, high: bool) -> Value:
    """`dp2a`: `c` plus the products of both 16-bit halves of `a` with the two lower, or `high`, bytes of `b`."""
    chosen = _wide_parts(b, 1, b_signed)[..., 2:] if high else _wide_parts(b, 1, b_signed)[..., :2]
    return unsigned(c) + _dot(_wide_parts(a, 2, a_signed), chosen)


def _wide_parts(x: Value, size: int, with_sign: bool) -> Value:
    return parts(unsigned(x), (SIGNED if with_sign else UNSIGNED)[size]).astype(np.int64)


def _dot(a: Value, b: Value) -> Value:
    return (a * b).sum(-1).astype(np.uint32)


def add_carry(a: Value, b: Value, carry: Value = _NONE) -> tuple[Value, Value]:
    """Computes `a + b + carry`: `add.cc`, or `addc.cc` with a carry."""
    a, b = unsigned(a), unsigned(b)
    total = a + b
    result = total + carry
    return result, (total < a) | (result < total)


def sub_borrow(a: Value, b: Value, borrow: Value = _NONE) -> tuple[Value, Value]:
    """Computes `a - b - borrow`: `sub.cc`, or `subc.cc` with a borrow."""
    a, b = unsigned(a), unsigned(b)
    rest = a - b
    return rest - borrow, (a < b) | ((rest == 0) & borrow)


def mad_carry(a: Value, b: Value, c: Value, high: bool, carry: Value = _NONE) -> tuple[Value, Value]:
    """The lower half of `a * b`, or with `high` the upper half, plus `c` and `carry`: `mad.cc`; with a carry `madc.cc`.

    The upper half depends on the sign of the operands, so `a` and `b` keep their type.
    """
    product = mul_hi(a, b) if high else unsigned(a) * unsigned(b)
    return add_carry(product, c, carry)
