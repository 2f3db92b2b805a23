"""Integer instructions and bit fields of PTX against Python's integers, at every width and beyond the width."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from rooflab.bench.emulator.numbers import bitfields, integers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TYPES = {f"{sign}{bits}": np.dtype(f"{code}{bits // 8}") for sign, code in ("si", "uu") for bits in (16, 32, 64)}
WIDE = ("s32", "u32", "s64", "u64")
COUNTS = np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
PLACES = np.array([0, 1, 7, 8, 30, 31, 32, 33, 62, 63, 64, 65, 100, 255, 256, 260, 2**32 - 1], np.uint32)


def values(dtype: np.dtype, seed: int, count: int = 300) -> np.ndarray:
    """Random integers of all sizes and the ends."""
    rng, info = np.random.default_rng(seed), np.iinfo(dtype)
    wild = rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    small = wild >> rng.integers(0, info.bits, count).astype(dtype)
    ends = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, info.max // 2 + 1], dtype)
    ends = np.append(ends, ~np.zeros(1, dtype))
    mixed = np.concatenate([ends, wild, small, np.repeat(ends, ends.size), np.tile(ends, ends.size)])
    return np.concatenate([mixed, rng.permutation(mixed)])


def plain(dtype: np.dtype) -> list[np.ndarray]:
    return [values(dtype, seed) for seed in (1, 2, 3)]


def counted(dtype: np.dtype) -> list[np.ndarray]:
    """Words, and how far they are shifted."""
    low, high, _ = plain(dtype)
    return [low, high, np.resize(COUNTS, low.size)]


def fields(dtype: np.dtype) -> list[np.ndarray]:
    """Words with every choice of a position and a length."""
    word, place, length = (x.ravel() for x in np.meshgrid(values(dtype, 1)[:30], PLACES, PLACES))
    return [word, np.roll(word, 7), place, length]


def bits_of(x: int, width: int) -> list[int]:
    return [x >> i & 1 for i in range(width)]


def number(bits: list[int]) -> int:
    return sum(bit << i for i, bit in enumerate(bits))


def clamped(x: int) -> int:
    return min(max(x, -(2**31)), 2**31 - 1)


def quotient(x: int, y: int) -> int:
    return -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def highest(x: int) -> int:
    return ((~x if x < 0 else x).bit_length() - 1) % 2**32


def extracted(width: int, signed: bool, a: int, position: int, length: int) -> int:
    bits, position, length = bits_of(a, width), position & 255, length & 255
    sign = bits[min(position + length - 1, width - 1)] if signed and length else 0
    return number([bits[position + i] if i < length and position + i < width else sign for i in range(width)])


def inserted(width: int, a: int, b: int, position: int, length: int) -> int:
    bits, position, length = bits_of(b, width), position & 255, length & 255
    for i in range(min(length, width - position)):
        bits[position + i] = a >> i & 1
    return number(bits)


def funnel(left: bool, clamp: bool, x: int, y: int, n: int) -> int:
    n = min(n, 32) if clamp else n % 32
    return ((y << 32 | x) << n) >> 32 if left else (y << 32 | x) >> n


def _rows(name: str) -> Iterator[tuple[str, Callable[..., int], list[np.ndarray], tuple[object, ...]]]:
    """Every instruction of a type: its function, the same in Python, operands, and what else it is given."""
    dtype, signed = TYPES[name], name[0] == "s"
    n = 8 * dtype.itemsize
    a, b, c = plain(dtype)
    count = counted(dtype)[2]
    yield "mul_hi", lambda x, y: x * y >> n, [a, b], ()
    yield "mad_hi", lambda x, y, z: (x * y >> n) + z, [a, b, c], ()
    yield "div", quotient, [a, b], ()
    yield "rem", lambda x, y: -1 if y == 0 else x - quotient(x, y) * y, [a, b], ()
    yield "shl", lambda x, k: x << min(k, 70), [a, count], ()
    yield "shr", lambda x, k: x >> min(k, 70), [a, count], ()
    if n < 64:
        yield "mul_wide", lambda x, y: x * y, [a, b], ()
    if n > 16:
        word, shifted, place, length = fields(dtype)
        yield "bfe", lambda x, p, k: extracted(n, signed, x, p, k), [word, place, length], ()
        yield (
            "bfi",
            lambda x, y, p, k: inserted(n, x, y, p, k),
            [word.view(f"u{n // 8}"), shifted.view(f"u{n // 8}"), place, length],
            (),
        )
        yield "bfind", highest, [a], ()
        yield "bfind", lambda x: n - 1 - highest(x) if highest(x) < 64 else 2**32 - 1, [a], (True,)
        powers = np.array([(1 << i) - j for i in range(1, n) for j in (0, 1)], f"u{n // 8}").view(dtype)
        yield "clz", lambda x: n - (x % 2**n).bit_length(), [np.concatenate([a, powers])], ()
        yield "popc", lambda x: (x % 2**n).bit_count(), [a], ()
        yield "brev", lambda x: number(bits_of(x, n)[::-1]), [a], ()
    if name == "s32":
        yield "add_sat_s32", lambda x, y: clamped(x + y), [a, b], ()
        yield "sub_sat_s32", lambda x, y: clamped(x - y), [a, b], ()
        yield "mad_hi", lambda x, y, z: clamped((x * y >> 32) + z), [a, b, c], (True,)
    if name == "u32":
        for one, other in product((False, True), repeat=2):
            yield "shf", lambda x, y, k, *, o=(one, other): funnel(*o, x, y, k), [a, b, count], (one, other)


@pytest.mark.parametrize("name", TYPES)
def test_instructions_are_those_of_pythons_integers(name: str) -> None:
    """Vectors against Python's integers; scalars against vectors; a scalar beside vectors."""
    dtype = TYPES[name]
    other = {"mul_wide": f"{dtype.kind}{min(8, 2 * dtype.itemsize)}", "bfi": f"u{dtype.itemsize}"}
    other |= dict.fromkeys(("bfind", "clz", "popc"), "u4")
    for instruction, reference, operands, more in _rows(name):
        function = getattr(integers, instruction, None) or getattr(bitfields, instruction)
        made = function(*operands, *more)
        assert made.shape == operands[0].shape, instruction
        assert made.dtype == other.get(instruction, dtype) or instruction == "brev", instruction
        modulus = 1 << 8 * made.itemsize
        rows = zip(*(x.tolist() for x in operands), strict=True)
        wrong = [(row, got) for row, got in zip(rows, made.tolist(), strict=True) if (got - reference(*row)) % modulus]
        assert not wrong, f"{instruction}{more}: {wrong[:3]}"
        for lane in range(0, made.size, max(1, made.size // 20)):
            single = function(*(x[lane] for x in operands), *more)
            assert type(single) is made.dtype.type and single == made[lane], instruction
        if len(operands) > 1:
            mixed = function(operands[0][3], *operands[1:], *more)
            same = function(np.full_like(operands[0], operands[0][3]), *operands[1:], *more)
            assert mixed.dtype == made.dtype and mixed.tolist() == same.tolist(), instruction


@pytest.mark.parametrize("name", WIDE)
def test_sums_and_differences_carry(name: str) -> None:
    dtype = TYPES[name]
    a, b, c = plain(dtype)
    bits, word = 8 * dtype.itemsize, np.dtype(f"u{dtype.itemsize}")
    unsigned = [x.view(word).tolist() for x in (a, b, c)]
    for carry_in in (np.bool_(False), np.bool_(True), np.arange(a.size) % 2 == 0):
        ins = np.broadcast_to(carry_in, a.shape).tolist()
        sums = [x + y + n for x, y, n in zip(*unsigned[:2], ins, strict=True)]
        rests = [x - y - n for x, y, n in zip(*unsigned[:2], ins, strict=True)]
        made = [(integers.add_carry(a, b, carry_in), sums), (integers.sub_borrow(a, b, carry_in), rests)]
        for high in (False, True):
            products = [x * y >> (bits if high else 0) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
            exact = [p % 2**bits + z + n for p, z, n in zip(products, unsigned[2], ins, strict=True)]
            made.append((integers.mad_carry(a, b, c, high, carry_in), exact))
        for (total, out), exact in made:
            assert total.dtype == word and out.dtype == np.bool_
            assert total.tolist() == [x % 2**bits for x in exact]
            assert out.tolist() == [not 0 <= x < 2**bits for x in exact]
    total, out = integers.add_carry(a[0], b[0])
    assert isinstance(total, word.type) and isinstance(out, np.bool_)


def test_every_table_of_lop3() -> None:
    a, b, c = np.random.default_rng(3).integers(0, 2**32, (3, 20), dtype=np.uint32)
    for table in range(256):
        wanted = [
            number([table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1 for i in range(32)])
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        made = np.broadcast_to(bitfields.lop3_function(table)(a, b, c), a.shape)
        assert made.tolist() == wanted and made.dtype == np.uint32, table
        single = bitfields.lop3_function(table)(a[0], b[0], c[0])
        assert isinstance(single, np.uint32) and single == wanted[0]


def chosen(a: int, b: int, selector: int) -> int:
    pair, made = a | b << 32, 0
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        byte = pair >> (8 * (nibble & 7)) & 255
        made |= (255 * (byte >> 7) if nibble & 8 else byte) << (8 * place)
    return made


def test_bytes_are_permuted_by_any_selector() -> None:
    rng = np.random.default_rng(4)
    a, b, selectors = rng.integers(0, 2**32, (3, 2000), dtype=np.uint32)
    wanted = [chosen(x, y, s) for x, y, s in zip(a.tolist(), b.tolist(), selectors.tolist(), strict=True)]
    assert bitfields.prmt(a, b, selectors).tolist() == wanted
    for selector in [0x5410, 0x7632, 0x3210, 0x0123, 0x8888, 0xFFFF, 0x4321, 0x1111, *selectors[:100].tolist()]:
        made = bitfields.prmt(a[:9], b[:9], np.uint32(selector))
        assert made.dtype == np.uint32
        assert made.tolist() == [chosen(x, y, selector) for x, y in zip(a[:9].tolist(), b[:9].tolist(), strict=True)]
        single = bitfields.prmt(a[0], b[0], np.uint32(selector))
        assert isinstance(single, np.uint32) and single == made[0]


def test_the_modes_of_prmt_are_those_of_the_table_in_the_isa() -> None:
    a, b = np.uint32(0x03020100), np.uint32(0x07060504)  # each byte is its own number
    wanted = {
        "f4e": [0x03020100, 0x04030201, 0x05040302, 0x06050403],
        "b4e": [0x05060700, 0x06070001, 0x07000102, 0x00010203],
        "rc8": [0x00000000, 0x01010101, 0x02020202, 0x03030303],
        "ecl": [0x03020100, 0x03020101, 0x03020202, 0x03030303],
        "ecr": [0x00000000, 0x01010100, 0x02020100, 0x03020100],
        "rc16": [0x01000100, 0x03020302, 0x01000100, 0x03020302],
    }
    for mode, words in wanted.items():
        assert [int(bitfields.prmt(a, b, np.uint32(choice), mode)) for choice in range(4)] == words, mode
