"""Computes the bit operations of PTX: bfe, bfi, bfind, brev, clz, popc, fns, bmsk, szext, lop3, prmt.

The source is PTX ISA 8.7, sections "Integer Arithmetic Instructions", "lop3" and "prmt".  A word has 32 or 64 bits, as
its NumPy type.  Positions, lengths, counts, and all operands of lop3 and prmt are uint32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from rooflab.bench.emulator.numbers.bits import UNSIGNED, Value, is_signed, parts, pick, unsigned, whole

_BYTE_MASK = np.uint32(0xFF)
_NO_POSITION = np.uint32(0xFFFFFFFF)
_UINT32_ONE, _WORD_BITS = np.uint32(1), np.uint32(32)
_LOGIC_TEXTS = "a&0 ~(a|b) b&~a ~a a&~b ~b a^b ~(a&b) a&b ~(a^b) b b|~a a a|~b a|b a|0xFFFFFFFF".split()
"""Expressions of two words; bit 2 a + b of an expression's index is the result for the bits `a` and `b`."""
_SELECTOR_TEXTS = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}
"""By mode, the four bytes that selectors 0 to 3 choose; each text begins with the highest byte."""
_MODE_WORDS = {mode: np.array([int(text, 16) for text in texts], np.uint32) for mode, texts in _SELECTOR_TEXTS.items()}
_BYTE_NUMBER_MASK, _SIGN_FLAG = np.uint32(7), np.uint32(8)


def bfe(a: Value, position: Value, length: Value) -> Value:
    """Returns a bit field: the `length` bits of `a` from bit `position` on (`bfe`).

    The field is extended with zeros, or with its sign if `a` is signed.  Only the low 8 bits of `position` and `length`
    count.  An empty field is 0."""
    word_dtype = UNSIGNED[a.itemsize]
    start_bit, bit_count = (position & _BYTE_MASK).astype(word_dtype), (length & _BYTE_MASK).astype(word_dtype)
    if not is_signed(a):
        return (a >> start_bit) & _ones(bit_count)
    word_bits = word_dtype.type(8 * a.itemsize)
    left_shift = word_bits - np.minimum(start_bit + bit_count, word_bits)
    dropped_bits = np.minimum(start_bit + left_shift, word_bits - word_dtype.type(1))
    extracted_bits = (unsigned(a) << left_shift).view(a.dtype) >> dropped_bits.view(a.dtype)
    return pick(bit_count == 0, a.dtype.type(0), extracted_bits)


def bfi(a: Value, b: Value, position: Value, length: Value) -> Value:
    """Replaces `length` bits of `b`, from bit `position` on, by the low bits of `a` (`bfi`).  The result is unsigned.

    Only the low 8 bits of `position` and `length` count.  Bits past the highest bit are dropped."""
    word_dtype = UNSIGNED[a.itemsize]
    start_bit, bit_count = (position & _BYTE_MASK).astype(word_dtype), (length & _BYTE_MASK).astype(word_dtype)
    field_mask = _ones(bit_count) << start_bit
    return (b & ~field_mask) | ((a << start_bit) & field_mask)


def _ones(count: Value) -> Value:
    """Returns words with their lowest `count` bits set. A large `count` sets all bits."""
    one = count.dtype.type(1)
    return (one << count) - one


def bfind(a: Value, shift_amount: bool = False) -> Value:
    """Returns the position of the highest bit that is not a sign bit, as uint32 (`bfind`); 0xffffffff if none.

    With `shift_amount`, the result is the left shift that would move this bit to the highest position."""
    if is_signed(a):
        a = a ^ (a >> (8 * a.itemsize - 1))
    bit_length = _bit_length(unsigned(a))
    if shift_amount:
        return pick(bit_length == 0, _NO_POSITION, np.uint32(8 * a.itemsize) - bit_length)
    return bit_length - _UINT32_ONE


def clz(a: Value) -> Value:
    """Returns the number of leading zero bits as uint32 (`clz`)."""
    return np.uint32(8 * a.itemsize) - _bit_length(unsigned(a))


def _bit_length(a: Value) -> Value:
    if a.itemsize < 8:
        return _float_length(a)
    high_word = (a >> np.uint64(32)).astype(np.uint32)
    return pick(high_word != 0, _float_length(high_word) + _WORD_BITS, _float_length(a.astype(np.uint32)))


def _float_length(a: Value) -> Value:
    """Returns the bit length of a uint32: it is the exponent of the equal float64."""
    return np.frexp(a.astype(np.float64))[1].astype(np.uint32)


def popc(a: Value) -> Value:
    """Returns the number of set bits as uint32 (`popc`)."""
    return np.bitwise_count(unsigned(a)).astype(np.uint32)


def brev(a: Value) -> Value:
    """Returns the bits of `a` in reverse order, as an unsigned word (`brev`)."""
    reversed_bytes = np.packbits(np.unpackbits(parts(a.byteswap(), np.uint8), axis=-1, bitorder="little"), axis=-1)
    return whole(reversed_bytes, UNSIGNED[a.itemsize])


def fns(mask: Value, base: Value, offset: Value) -> Value:
    """Returns the uint32 position of the `abs(offset)`-th set bit of `mask`, counted from bit `base` on (`fns.b32`).

    `offset` is int32: positive counts upward, negative downward, 0 tests only bit `base`.  Returns 0xffffffff if no bit
    fits."""
    mask, base, offset = unsigned(mask), unsigned(base), offset.view(np.int32)
    is_upward, is_zero_offset = offset > 0, offset == 0
    remaining_bits = np.abs(offset).astype(np.int64)
    remaining_bits = pick(is_zero_offset, 1, remaining_bits)
    found_position = _NO_POSITION
    for bit_step in range(32):
        candidate_bit = pick(offset < 0, base - np.uint32(bit_step), base + np.uint32(bit_step)).astype(np.uint32)
        is_in_word = (candidate_bit < _WORD_BITS) & ((is_upward | (offset < 0)) if bit_step else True)
        is_set_bit = is_in_word & (((mask >> (candidate_bit & np.uint32(31))) & _UINT32_ONE) == _UINT32_ONE)
        remaining_bits = remaining_bits - is_set_bit
        found_position = pick(is_set_bit & (remaining_bits == 0), candidate_bit, found_position)
    return found_position.astype(np.uint32)


def bmsk(position: Value, width: Value, clamp: bool) -> Value:
    """Returns a uint32 with `width` bits set, from bit `position` on (`bmsk.b32`).

    Without `clamp` (`.wrap`), `position` and `width` are taken modulo 32.  With `clamp`, a `position` of 32 or more
    gives 0, and a `width` of 32 or more sets all bits from `position` up."""
    if not clamp:
        position, width = position & np.uint32(31), width & np.uint32(31)
    return _ones(width) << position


def szext(a: Value, bits: Value, clamp: bool) -> Value:
    """Returns the low `bits` bits of a 32-bit integer (`szext`), extended by zeros, or by their sign if `a` is int32.

    If `bits` is 0, the result is 0.  Without `clamp`, `bits` is taken modulo 32.  With `clamp`, `bits` of 32 or more
    returns `a`."""
    if not clamp:
        bits = bits & np.uint32(31)
    shift = _WORD_BITS - np.minimum(bits, _WORD_BITS)
    if not is_signed(a):
        return a & _ones(bits)
    extracted_bits = (unsigned(a) << shift).view(np.int32) >> np.minimum(shift, np.uint32(31)).view(np.int32)
    return pick(bits == 0, np.int32(0), extracted_bits)


@cache
def lop3_function(table: int) -> Callable[[Value, Value, Value], Value]:
    """Returns a function of words `a`, `b`, `c` that computes `lop3.b32` with at most five logic operations.

    Bit `4 * a + 2 * b + c` of `table` is the result for single bits `a`, `b`, `c`.  Raises `ValueError` if `table` has
    more than 8 bits."""
    if not 0 <= table <= 255:
        raise ValueError(f"table: expected 0 to 255, got {table}")
    base_table = sum((table >> (2 * table_bit) & 1) << table_bit for table_bit in range(4))
    change_table = base_table ^ sum((table >> (2 * table_bit + 1) & 1) << table_bit for table_bit in range(4))
    base, change = _LOGIC_TEXTS[base_table], _LOGIC_TEXTS[change_table]
    if change_table == 0:
        text = base
    elif change_table == 15:
        text = f"({base}) ^ c"
    else:
        text = f"({change}) & c" if base_table == 0 else f"({base}) ^ (({change}) & c)"
    function: Callable[[Value, Value, Value], Value] = eval(f"lambda a, b, c: {text}")
    return function


def prmt(a: Value, b: Value, selector: Value, mode: str = "") -> Value:
    """Selects four of eight bytes: bytes 0 to 3 are in `a`, bytes 4 to 7 are in `b` (`prmt.b32`).

    Each nibble of `selector` selects one byte.  If the nibble's highest bit is set, the byte's sign fills the result's
    byte.  With `mode`, the two lowest bits of `selector` choose one of four fixed selections.  Raises `ValueError` on a
    mode that PTX lacks."""
    if mode:
        if mode not in _MODE_WORDS:
            raise ValueError(f"mode: expected one of {', '.join(_MODE_WORDS)}, got {mode!r}")
        selector = _MODE_WORDS[mode][selector & np.uint32(3)]
    if np.ndim(selector) == 0:
        return _permuted(a, b, int(selector) & 0xFFFF)
    source_bytes = (b.astype(np.uint64) << 32) | a.astype(np.uint64)
    result = np.uint32(0)
    for byte_position in range(4):
        selector_nibble = selector >> np.uint32(4 * byte_position)
        byte = (source_bytes >> (8 * (selector_nibble & _BYTE_NUMBER_MASK))).astype(np.uint32) & _BYTE_MASK
        sign_byte = (byte >> np.uint32(7)) * _BYTE_MASK
        result = result | (np.where(selector_nibble & _SIGN_FLAG, sign_byte, byte) << np.uint32(8 * byte_position))
    return result


@cache
def _moves(selector: int) -> tuple[list[tuple[bool, int, int]], list[tuple[bool, int, int]]]:
    """Splits the selector of `prmt` into a list of moves and a list of sign bytes.

    A move `(is_from_b, distance, mask)` shifts `b` or `a` left by `distance` bytes, and keeps the bits in `mask`.  A
    negative distance shifts right.  A sign byte `(is_from_b, byte, place)` fills byte `place` of the result with the
    sign of `byte`."""
    mask_by_move: dict[tuple[bool, int], int] = {}
    sign_bytes = []
    for byte_position in range(4):
        selector_nibble = selector >> (4 * byte_position)
        is_from_b, byte = bool(selector_nibble & 4), selector_nibble & 3
        if selector_nibble & 8:
            sign_bytes.append((is_from_b, byte, byte_position))
        else:
            move_key = (is_from_b, byte_position - byte)
            mask_by_move[move_key] = mask_by_move.get(move_key, 0) | (0xFF << (8 * byte_position))
    return [(is_from_b, distance, mask) for (is_from_b, distance), mask in mask_by_move.items()], sign_bytes


def _permuted(a: Value, b: Value, selector: int) -> Value:
    """Runs a PTX `prmt` with one selector for all lanes. Moves all bytes with the same shift distance at once."""
    byte_shifts, sign_bytes = _moves(selector)
    result_word = None
    for is_from_b, distance, mask in byte_shifts:
        operand = b if is_from_b else a
        if distance:
            operand = operand << np.uint32(8 * distance) if distance > 0 else operand >> np.uint32(-8 * distance)
        shifted_bytes = operand & np.uint32(mask)
        result_word = shifted_bytes if result_word is None else result_word | shifted_bytes
    for is_from_b, byte, position in sign_bytes:
        sign_bit = ((b if is_from_b else a) >> np.uint32(8 * byte + 7)) & np.uint32(1)
        shifted_bytes = sign_bit * np.uint32(0xFF << (8 * position))
        result_word = shifted_bytes if result_word is None else result_word | shifted_bytes
    return result_word
