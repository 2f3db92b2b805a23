"""Bit fields, counts and permutations of PTX: bfe, bfi, bfind, brev, clz, popc, fns, bmsk, szext, lop3, prmt.

PTX ISA 8.7, sections "Integer Arithmetic Instructions", "lop3" and "prmt".  Words have 32 or 64 bits, as their NumPy
type says.  Positions, lengths, counts, and all operands of lop3 and prmt are uint32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from rooflab.bench.emulator.numbers.bits import UNSIGNED, Value, is_signed, pick, unsigned

_BYTE = np.uint32(0xFF)
_NONE = np.uint32(0xFFFFFFFF)
_ONE, _WIDTH = np.uint32(1), np.uint32(32)
_SWAPS = ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F))
_PAIRS: tuple[Callable[[Value, Value], Value], ...] = (
    lambda a, b: a & np.uint32(0),
    lambda a, b: ~(a | b),
    lambda a, b: b & ~a,
    lambda a, b: ~a,
    lambda a, b: a & ~b,
    lambda a, b: ~b,
    lambda a, b: a ^ b,
    lambda a, b: ~(a & b),
    lambda a, b: a & b,
    lambda a, b: ~(a ^ b),
    lambda a, b: b,
    lambda a, b: b | ~a,
    lambda a, b: a,
    lambda a, b: a | ~b,
    lambda a, b: a | b,
    lambda a, b: a | np.uint32(0xFFFFFFFF),
)
"""Logic functions of two words; bit 2 a + b of a function's index is the result for the bits `a` and `b`."""
_SOURCES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}
"""By mode, the four bytes that selectors 0 to 3 choose; each text begins with the highest byte."""
_SELECTORS = {mode: np.array([int(text, 16) for text in texts], np.uint32) for mode, texts in _SOURCES.items()}
_NIBBLE, _SIGN = np.uint32(7), np.uint32(8)


def bfe(a: Value, position: Value, length: Value) -> Value:
    """`bfe`: the `length` bits of `a` from bit `position` on, extended by zeros, or by their sign if `a` is signed.

    Only the low 8 bits of `position` and `length` count.  A field that extends past the highest bit takes its sign from
    that bit; an empty field is 0.
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
    """`bfi`: `b` with `length` of its bits, from bit `position` on, replaced by the low bits of `a`; unsigned.

    Only the low 8 bits of `position` and `length` count; bits past the highest bit are dropped.
    """
    word = UNSIGNED[a.itemsize]
    start, count = (position & _BYTE).astype(word), (length & _BYTE).astype(word)
    mask = _ones(count) << start
    return (b & ~mask) | ((a << start) & mask)


def _ones(count: Value) -> Value:
    """Words whose lowest `count` bits are set; all bits are set if `count` is the word's width or more."""
    one = count.dtype.type(1)
    return (one << count) - one


def bfind(a: Value, shift_amount: bool = False) -> Value:
    """`bfind`: uint32 position of the highest bit that is not a sign bit; 0xffffffff if there is no such bit.

    With `shift_amount` the result is the left shift that would move this bit to the highest position.
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
    """The bit length of a uint32, taken from the exponent of the float64 with the same value."""
    return np.frexp(a.astype(np.float64))[1].astype(np.uint32)


def popc(a: Value) -> Value:
    """`popc`: uint32 count of the bits that are set."""
    return np.bitwise_count(unsigned(a)).astype(np.uint32)


def brev(a: Value) -> Value:
    """`brev`: the bits of `a` in reverse order; unsigned."""
    a = unsigned(a).byteswap()
    for distance, mask in _SWAPS:
        keep = a.dtype.type(mask & ((1 << (8 * a.itemsize)) - 1))
        a = ((a >> distance) & keep) | ((a & keep) << distance)
    return a


def fns(mask: Value, base: Value, offset: Value) -> Value:
    """`fns.b32`: uint32 position of the |`offset`|-th set bit of `mask`, counted from bit `base` on.

    `offset` is int32: positive counts upward, negative downward, 0 asks for bit `base`.  0xffffffff: no such bit.
    """
    mask, base, offset = unsigned(mask), unsigned(base), offset.view(np.int32)
    upward, at_base = offset > 0, offset == 0
    left = np.abs(offset).astype(np.int64)
    left = pick(at_base, 1, left)
    position = _NONE
    for step in range(32):
        place = pick(offset < 0, base - np.uint32(step), base + np.uint32(step)).astype(np.uint32)
        inside = (place < _WIDTH) & ((upward | (offset < 0)) if step else True)
        hit = inside & (((mask >> (place & np.uint32(31))) & _ONE) == _ONE)
        left = left - hit
        position = pick(hit & (left == 0), place, position)
    return position.astype(np.uint32)


def bmsk(position: Value, width: Value, clamp: bool) -> Value:
    """`bmsk.b32`: a uint32 in which `width` bits are set, from bit `position` on.

    Without `clamp` (`.wrap`) `position` and `width` are taken modulo 32.  With `clamp` a position of 32 or more gives
    0, and a width of 32 or more sets all bits from `position` up.
    """
    if not clamp:
        position, width = position & np.uint32(31), width & np.uint32(31)
    return _ones(width) << position


def szext(a: Value, bits: Value, clamp: bool) -> Value:
    """`szext`: the low `bits` bits of a 32-bit integer, extended by zeros, or by their sign if `a` is int32.

    If `bits` is 0, the result is 0.  If `bits` is 32 or more, it is taken modulo 32; with `clamp` the result is `a`.
    """
    if not clamp:
        bits = bits & np.uint32(31)
    above = _WIDTH - np.minimum(bits, _WIDTH)
    if not is_signed(a):
        return a & _ones(bits)
    field = (unsigned(a) << above).view(np.int32) >> np.minimum(above, np.uint32(31)).view(np.int32)
    return pick(bits == 0, np.int32(0), field)


@cache
def lop3_function(table: int) -> Callable[[Value, Value, Value], Value]:
    """`lop3.b32` for one `table`: a function of words a, b and c with at most five logic operations.

    Bit 4 a + 2 b + c of `table` is the result for the bits a, b and c.  Raises `ValueError` on a table not of 8 bits.
    """
    if not 0 <= table <= 255:
        raise ValueError(f"table: expected 0 to 255, got {table}")
    without = sum((table >> (2 * place) & 1) << place for place in range(4))
    changed = without ^ sum((table >> (2 * place + 1) & 1) << place for place in range(4))
    base, other = _PAIRS[without], _PAIRS[changed]
    if changed == 0:
        return lambda a, b, c: base(a, b)
    if changed == 15:
        return lambda a, b, c: base(a, b) ^ c
    if without == 0:
        return lambda a, b, c: other(a, b) & c
    return lambda a, b, c: base(a, b) ^ (other(a, b) & c)


def prmt(a: Value, b: Value, selector: Value, mode: str = "") -> Value:
    """`prmt.b32`: selects four of the eight bytes of `a` (bytes 0 to 3) and `b` (bytes 4 to 7).

    Without a mode each nibble of `selector` chooses one byte; if the nibble's highest bit is set, the sign of the
    chosen byte fills the result's byte.  With a mode, the two lowest bits of `selector` choose one of the mode's
    selections.  Raises `ValueError` on a mode that PTX lacks.
    """
    if mode:
        if mode not in _SELECTORS:
            raise ValueError(f"mode: expected one of {', '.join(_SELECTORS)}, got {mode!r}")
        selector = _SELECTORS[mode][selector & np.uint32(3)]
    if np.ndim(selector) == 0:
        return _permuted(a, b, int(selector) & 0xFFFF)
    pair = (b.astype(np.uint64) << 32) | a.astype(np.uint64)
    made = np.uint32(0)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place)
        byte = (pair >> (8 * (nibble & _NIBBLE))).astype(np.uint32) & _BYTE
        spread = (byte >> np.uint32(7)) * _BYTE
        made = made | (np.where(nibble & _SIGN, spread, byte) << np.uint32(8 * place))
    return made


@cache
def _moves(selector: int) -> tuple[list[tuple[bool, int, int]], list[tuple[bool, int, int]]]:
    """The moves of plain bytes (from `b`, bytes upward, mask), and the sign bytes (from `b`, byte, place)."""
    plain: dict[tuple[bool, int], int] = {}
    signs = []
    for place in range(4):
        nibble = selector >> (4 * place)
        from_b, byte = bool(nibble & 4), nibble & 3
        if nibble & 8:
            signs.append((from_b, byte, place))
        else:
            key = (from_b, place - byte)
            plain[key] = plain.get(key, 0) | (0xFF << (8 * place))
    return [(from_b, distance, mask) for (from_b, distance), mask in plain.items()], signs


def _permuted(a: Value, b: Value, selector: int) -> Value:
    """`prmt` with one selector for all lanes: bytes that move by the same distance are moved together."""
    moves, signs = _moves(selector)
    made = None
    for from_b, distance, mask in moves:
        word = b if from_b else a
        if distance:
            word = word << np.uint32(8 * distance) if distance > 0 else word >> np.uint32(-8 * distance)
        moved = word & np.uint32(mask)
        made = moved if made is None else made | moved
    for from_b, byte, place in signs:
        sign = ((b if from_b else a) >> np.uint32(8 * byte + 7)) & np.uint32(1)
        moved = sign * np.uint32(0xFF << (8 * place))
        made = moved if made is None else made | moved
    return made
