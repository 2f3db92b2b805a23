"""Implements PTX's integer arithmetic: multiply, divide, min, max, absolute value, shifts, byte dot products, carries.

The source is PTX ISA 8.7, sections "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic
Instructions" and "Logic and Shift Instructions".  The operands' NumPy type gives the sign (`.s32` is int32).  Most
results have the operands' type.  Overflow wraps around.
"""

from __future__ import annotations

import numpy as np

from rooflab.bench.emulator.numbers.bits import SIGNED, UNSIGNED, Value, is_signed, parts, pick, some, unsigned, whole

_LOW_WORD_MASK, _WORD_BITS = np.uint64(0xFFFFFFFF), np.uint64(32)
_ZERO_CARRY = np.bool_(False)


def mul_wide(a: Value, b: Value) -> Value:
    """Runs `mul.wide`: returns the product of two 16- or 32-bit integers, with twice the number of bits."""
    wide_type = (SIGNED if is_signed(a) else UNSIGNED)[2 * a.itemsize]
    return a.astype(wide_type) * b.astype(wide_type)


def mul_hi(a: Value, b: Value) -> Value:
    """Runs `mul.hi`: returns the upper half of the product of 16-, 32- or 64-bit integers."""
    if a.itemsize < 8:
        return (mul_wide(a, b) >> (8 * a.itemsize)).astype(a.dtype)
    upper_word = _upper_u64(unsigned(a), unsigned(b))
    if not is_signed(a):
        return upper_word
    # As unsigned, a negative operand is 2**64 too large: subtract the other operand from the upper half.
    upper_word = upper_word - (unsigned(a >> 63) & unsigned(b)) - (unsigned(b >> 63) & unsigned(a))
    return upper_word.view(np.int64)


def _upper_u64(a: Value, b: Value) -> Value:
    """Returns the upper 64 bits of the product of two uint64 values."""
    a_low, a_high, b_low, b_high = a & _LOW_WORD_MASK, a >> _WORD_BITS, b & _LOW_WORD_MASK, b >> _WORD_BITS
    middle_product = a_high * b_low + ((a_low * b_low) >> _WORD_BITS)
    second_product = a_low * b_high + (middle_product & _LOW_WORD_MASK)
    return a_high * b_high + (middle_product >> _WORD_BITS) + (second_product >> _WORD_BITS)


def mad_hi(a: Value, b: Value, c: Value, sat: bool = False) -> Value:
    """Runs `mad.hi`: adds `c` to the upper half of `a * b`.  With `sat` (int32 only), the sum is clamped."""
    return add_sat_s32(mul_hi(a, b), c) if sat else mul_hi(a, b) + c


def mul24(a: Value, b: Value, high: bool = False) -> Value:
    """Runs `mul24`: multiplies the low 24 bits of 32-bit integers.  Returns bits 0 to 31 of the product.  With `high`,
    returns bits 16 to 47."""
    product = mul_wide((a << 8) >> 8, (b << 8) >> 8)
    return (product >> 16 if high else product).astype(a.dtype)


def mad24(a: Value, b: Value, c: Value, high: bool = False, sat: bool = False) -> Value:
    """Runs `mad24`: adds `c` to the result of `mul24`.  With `sat` (int32 only), the sum is clamped."""
    product = mul24(a, b, high)
    return add_sat_s32(product, c) if sat else product + c


def add_sat_s32(a: Value, b: Value) -> Value:
    """Runs `add.sat.s32`: returns the sum of two int32, clamped to the range of int32."""
    return _clamped(a.astype(np.int64) + b.astype(np.int64))


def sub_sat_s32(a: Value, b: Value) -> Value:
    """Runs `sub.sat.s32`: returns the difference of two int32, clamped to the range of int32."""
    return _clamped(a.astype(np.int64) - b.astype(np.int64))


def _clamped(x: Value) -> Value:
    return np.minimum(np.maximum(x, -(2**31)), 2**31 - 1).astype(np.int32)


def sad(a: Value, b: Value, c: Value) -> Value:
    """Runs `sad`: returns `c + |a - b|`."""
    return c + (np.maximum(a, b) - np.minimum(a, b))


def div(a: Value, b: Value) -> Value:
    """Runs `div`: returns the truncated quotient.  If `b` is 0 (undefined in PTX), all bits of the result are set."""
    is_zero = b == 0
    if not is_signed(a):
        quotient = a // b
    else:
        quotient_magnitude = unsigned(np.abs(a)) // unsigned(np.abs(b))
        quotient = pick((a ^ b) < 0, np.negative(quotient_magnitude), quotient_magnitude).view(a.dtype)
    return pick(is_zero, ~a.dtype.type(0), quotient) if some(is_zero) else quotient


def rem(a: Value, b: Value) -> Value:
    """Runs `rem`: returns the remainder of `div`, with the sign of `a`.  If `b` is 0, all result bits are set."""
    is_zero = b == 0
    if not is_signed(a):
        remainder = a % b
    else:
        remainder_magnitude = unsigned(np.abs(a)) % unsigned(np.abs(b))
        remainder = pick(a < 0, np.negative(remainder_magnitude), remainder_magnitude).view(a.dtype)
    return pick(is_zero, ~a.dtype.type(0), remainder) if some(is_zero) else remainder


def pairs(function: np.ufunc, a: Value, b: Value, dtype: np.dtype, relu: bool) -> Value:
    """Applies `function` to the low halves and to the high halves of two packed uint32, viewed as 16-bit `dtype`.  With
    `relu`, a negative result becomes 0."""
    results = function(parts(a, dtype), parts(b, dtype))
    return whole(np.maximum(results, 0) if relu else results, np.uint32)


def shl(a: Value, count: Value) -> Value:
    """Runs `shl`: shifts left.  The result is 0 if `count`, a uint32, is at least the width of `a`."""
    # NumPy defines shifts by the width and more, in the type that both operands promote to.
    shifted_bits = unsigned(a) << count
    return shifted_bits.astype(UNSIGNED[a.itemsize], copy=False).view(a.dtype)


def shr(a: Value, count: Value) -> Value:
    """Runs `shr`: shifts right, and fills with 0 or the sign bit of a signed integer.  `count` may exceed the width."""
    if is_signed(a) and a.itemsize == 4:
        # As int32 a count from 2**31 on is negative, which NumPy also treats as too large; int64 would cost two casts.
        return a >> count.view(np.int32)
    return (a >> count).astype(a.dtype, copy=False)


def shf(low: Value, high: Value, count: Value, left: bool, clamp: bool) -> Value:
    """Runs `shf`: shifts the 64-bit value of `high` and `low`.  With `left`, shifts left and returns the upper word.
    Otherwise, shifts right and returns the lower word.

    With `clamp`, a `count` above 32 means 32.  Without it (`.wrap`), `count` is taken modulo 32."""
    count = np.minimum(count, np.uint32(32)) if clamp else count & np.uint32(31)
    opposite_shift = np.uint32(32) - count
    return (high << count) | (low >> opposite_shift) if left else (high << opposite_shift) | (low >> count)


def dp4a(a: Value, b: Value, c: Value, a_signed: bool, b_signed: bool) -> Value:
    """Runs `dp4a`: adds `c` to the dot product of the four bytes of `a` and of `b`.  All values are uint32 bits."""
    return unsigned(c) + _dot(_wide_parts(a, 1, a_signed), _wide_parts(b, 1, b_signed))


def dp2a(a: Value, b: Value, c: Value, a_signed: bool, b_signed: bool, high: bool) -> Value:
    """Runs `dp2a`: adds `c` to a dot product of two elements.  The elements are the 16-bit halves of `a`, and the lower
    two bytes of `b`.  With `high`, the upper two bytes of `b` replace the lower."""
    b_bytes = _wide_parts(b, 1, b_signed)[..., 2:] if high else _wide_parts(b, 1, b_signed)[..., :2]
    return unsigned(c) + _dot(_wide_parts(a, 2, a_signed), b_bytes)


def _wide_parts(x: Value, size: int, with_sign: bool) -> Value:
    return parts(unsigned(x), (SIGNED if with_sign else UNSIGNED)[size]).astype(np.int64)


def _dot(a: Value, b: Value) -> Value:
    return (a * b).sum(-1).astype(np.uint32)


def add_carry(a: Value, b: Value, carry: Value = _ZERO_CARRY) -> tuple[Value, Value]:
    """Returns `a + b + carry` and the carry out.  This is `add.cc`, or `addc.cc` with a `carry`."""
    a, b = unsigned(a), unsigned(b)
    sum_of_operands = a + b
    sum_with_carry = sum_of_operands + carry
    return sum_with_carry, (sum_of_operands < a) | (sum_with_carry < sum_of_operands)


def sub_borrow(a: Value, b: Value, borrow: Value = _ZERO_CARRY) -> tuple[Value, Value]:
    """Returns `a - b - borrow` and the borrow out.  This is `sub.cc`, or `subc.cc` with a `borrow`."""
    a, b = unsigned(a), unsigned(b)
    difference = a - b
    return difference - borrow, (a < b) | ((difference == 0) & borrow)


def mad_carry(a: Value, b: Value, c: Value, high: bool, carry: Value = _ZERO_CARRY) -> tuple[Value, Value]:
    """Runs `mad.cc`, or `madc.cc` with a `carry`: adds `c` to the lower half of `a * b`, or to the upper half with
    `high`.

    The upper half depends on whether `a` and `b` are signed, so they must have the instruction's type."""
    product = mul_hi(a, b) if high else unsigned(a) * unsigned(b)
    return add_carry(product, c, carry)
