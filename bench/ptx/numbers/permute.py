"""`lop3` and `prmt` of PTX: any logic function of three words, and any choice of bytes of two.

PTX ISA 8.7, sections "lop3" and "prmt".  Operands and results are uint32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value

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
"""Logic functions of two words; bit 2 a + b of a function's place is its result for the bits a and b."""
_SOURCES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}
"""The bytes that each mode takes for selectors 0 to 3, the highest first."""
_SELECTORS = {mode: np.array([int(text, 16) for text in texts], np.uint32) for mode, texts in _SOURCES.items()}
_BYTE, _NIBBLE, _SIGN = np.uint32(0xFF), np.uint32(7), np.uint32(8)


def lop3(a: Value, b: Value, c: Value, table: int) -> Value:
    """`lop3.b32`: bit 4 a + 2 b + c of `table` is the result for the bits a, b and c.

    Raises `ValueError` on a table that is not of 8 bits.
    """
    return lop3_function(table)(a, b, c)


@cache
def lop3_function(table: int) -> Callable[[Value, Value, Value], Value]:
    """The function of a, b and c that `lop3` is for one table, of five logic operations at most."""
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
    """`prmt.b32`: four bytes of the eight of a (0 to 3) and b (4 to 7).

    Without a mode each nibble of `selector` names the byte for its place, and its highest bit asks for that byte's sign
    in all eight bits; with one, the two lowest bits of `selector` name a choice of the mode.  Raises `ValueError` on a
    mode that PTX lacks.
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
    """What a selector moves: (from b, bytes upward, mask) of plain bytes that move as one, and of bytes for signs."""
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
    """`prmt` by one selector for all lanes: bytes that keep their distance move together."""
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
