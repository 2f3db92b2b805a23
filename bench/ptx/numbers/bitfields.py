"""Bit fields and counts of PTX: bfe, bfi, bfind, brev, clz, popc, fns, bmsk, szext.

PTX ISA 8.7, section "Integer Arithmetic Instructions".  Words are 32 or 64 bits wide, as their NumPy type says;
positions, lengths and counts are uint32.
"""

from __future__ import annotations

import numpy as np

from rooflab.bench.ptx.numbers.bits import UNSIGNED, Value, is_signed, pick, unsigned

_BYTE = np.uint32(0xFF)
_NONE = np.uint32(0xFFFFFFFF)
_ONE, _WIDTH = np.uint32(1), np.uint32(32)
_SWAPS = ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F))


def bfe(a: Value, position: Value, length: Value) -> Value:
    """`bfe`: the field of `length` bits that starts at bit `position`, extended by zeros, or by a signed field's sign.

    Of position and length the low 8 bits count.  A field that passes the highest bit takes its sign from there, and
    one of no bits is 0.
    """
    word = UNSIGNED[a.itemsize]
    start, count = (position & _BYTE).astype(word), (length & _BYTE).astype(word)
    if not is_signed(a):
        return (a >> start) & _ones(count)
    width = word.type(8 * a.itemsize)
    above = width - np.minimum(start + count, width)
    drop = np.minimum(start + above, width - word.type(1))
    field = (unsigned(a) << above).view(a.dtype) >> drop.view(a.dtype)
    return pick(count == 0, a.dtype.type(0), field)


def bfi(a: Value, b: Value, position: Value, length: Value) -> Value:
    """`bfi`: b with `length` bits from bit `position` on replaced by the low bits of a; unsigned.

    Of position and length the low 8 bits count; what passes the highest bit is left out.
    """
    word = UNSIGNED[a.itemsize]
    start, count = (position & _BYTE).astype(word), (length & _BYTE).astype(word)
    mask = _ones(count) << start
    return (b & ~mask) | ((a << start) & mask)


def _ones(count: Value) -> Value:
    """Words whose lowest `count` bits are set; all of them where it is the width or more."""
    one = count.dtype.type(1)
    return (one << count) - one


def bfind(a: Value, shift_amount: bool = False) -> Value:
    """`bfind`: uint32 position of the highest bit that is not a sign bit, 0xffffffff where there is none.

    `shift_amount` gives the left shift that would bring it to the highest bit instead.
    """
    if is_signed(a):
        a = a ^ (a >> (8 * a.itemsize - 1))
    length = _bit_length(unsigned(a))
    if shift_amount:
        return pick(length == 0, _NONE, np.uint32(8 * a.itemsize) - length)
    return length - _ONE


def clz(a: Value) -> Value:
    """`clz`: uint32 count of leading zeros."""
    return np.uint32(8 * a.itemsize) - _bit_length(unsigned(a))


def _bit_length(a: Value) -> Value:
    if a.itemsize < 8:
        return _float_length(a)
    high = (a >> np.uint64(32)).astype(np.uint32)
    return pick(high != 0, _float_length(high) + _WIDTH, _float_length(a.astype(np.uint32)))


def _float_length(a: Value) -> Value:
    """Bits of a uint32, from the exponent of the float64 that it is exactly."""
    return np.frexp(a.astype(np.float64))[1].astype(np.uint32)


def popc(a: Value) -> Value:
    """`popc`: uint32 count of ones."""
    return np.bitwise_count(unsigned(a)).astype(np.uint32)


def brev(a: Value) -> Value:
    """`brev`: the bits in reverse order; unsigned."""
    a = unsigned(a).byteswap()
    for distance, mask in _SWAPS:
        keep = a.dtype.type(mask & ((1 << (8 * a.itemsize)) - 1))
        a = ((a >> distance) & keep) | ((a & keep) << distance)
    return a


def fns(mask: Value, base: Value, offset: Value) -> Value:
    """`fns.b32`: uint32 position of the |offset|-th set bit of `mask` from bit `base` on, upward or downward.

    `offset` is int32; 0 asks for bit `base` itself.  0xffffffff where there is no such bit.
    """
    mask, base, offset = unsigned(mask), unsigned(base), offset.view(np.int32)
    upward, at_base = offset > 0, offset == 0
    left = np.abs(offset).astype(np.int64)
    left = pick(at_base, 1, left)
    found = _NONE
    for step in range(32):
        place = pick(offset < 0, base - np.uint32(step), base + np.uint32(step)).astype(np.uint32)
        inside = (place < _WIDTH) & ((upward | (offset < 0)) if step else True)
        hit = inside & (((mask >> (place & np.uint32(31))) & _ONE) == _ONE)
        left = left - hit
        found = pick(hit & (left == 0), place, found)
    return found.astype(np.uint32)


def bmsk(position: Value, width: Value, clamp: bool) -> Value:
    """`bmsk.b32`: uint32 with `width` ones from bit `position` on.

    Both are taken modulo 32 (`.wrap`), or a position from 32 on gives 0 and a width from 32 on all bits above the
    position (`clamp`).
    """
    if not clamp:
        position, width = position & np.uint32(31), width & np.uint32(31)
    return _ones(width) << position


def szext(a: Value, bits: Value, clamp: bool) -> Value:
    """`szext`: the low `bits` bits of a 32-bit integer, extended by zeros or, of an int32, by their sign.

    0 bits give 0.  From 32 on, `bits` is taken modulo 32 (`.wrap`), or a stays as it is (`clamp`).
    """
    if not clamp:
        bits = bits & np.uint32(31)
    above = _WIDTH - np.minimum(bits, _WIDTH)
    if not is_signed(a):
        return a & _ones(bits)
    field = (unsigned(a) << above).view(np.int32) >> np.minimum(above, np.uint32(31)).view(np.int32)
    return pick(bits == 0, np.int32(0), field)
