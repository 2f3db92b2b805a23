"""Bit fields, counts and permutations of PTX against bits taken one by one, as the ISA's pseudocode does it."""

from __future__ import annotations

import numpy as np
import pytest

from rooflab.bench.ptx.numbers import bitfields

WORDS = {name: np.dtype(code) for name, code in (("s32", "i4"), ("u32", "u4"), ("s64", "i8"), ("u64", "u8"))}
PLACES = np.array([0, 1, 7, 8, 30, 31, 32, 33, 62, 63, 64, 65, 100, 255, 256, 260, 2**32 - 1], np.uint32)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def values(dtype: np.dtype, count: int = 60) -> np.ndarray:
    rng, info = np.random.default_rng(1), np.iinfo(dtype)
    wild = rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    ends = np.array([info.min, info.max, 0, 1, info.max // 2 + 1], dtype)
    ends = np.append(ends, ~np.zeros(1, dtype))
    return np.concatenate([ends, wild, wild >> rng.integers(0, info.bits, count).astype(dtype)])


def bits_of(x: int, width: int) -> list[int]:
    return [x >> i & 1 for i in range(width)]


def number(bits: list[int]) -> int:
    return sum(bit << i for i, bit in enumerate(bits))


def check(function, reference, operands, *more) -> np.ndarray:
    """Every lane against Python's integers, unsigned, and scalars against lanes."""
    made = function(*operands, *more)
    width = 8 * made.itemsize
    rows = list(zip(*(x.tolist() for x in operands), strict=True))
    wrong = [(row, got) for row, got in zip(rows, made.tolist(), strict=True) if (got - reference(*row)) % 2**width]
    assert not wrong, [(row, got, reference(*row)) for row, got in wrong[:3]]
    for lane in range(0, made.size, max(1, made.size // 20)):
        single = function(*(x[lane] for x in operands), *more)
        assert type(single) is made.dtype.type and single == made[lane]
    return made


def fields(a: np.ndarray) -> list[np.ndarray]:
    """Words with every choice of a position and a length."""
    word, place, length = (x.ravel() for x in np.meshgrid(a[:40], PLACES, PLACES))
    return [word, place, length]


@pytest.mark.parametrize("name", WORDS)
def test_fields_are_extracted_with_zeros_or_their_sign(name):
    width = 8 * WORDS[name].itemsize

    def reference(a: int, position: int, length: int) -> int:
        bits, position, length = bits_of(a, width), position & 255, length & 255
        sign = bits[min(position + length - 1, width - 1)] if name[0] == "s" and length else 0
        return number([bits[position + i] if i < length and position + i < width else sign for i in range(width)])

    made = check(bitfields.bfe, reference, fields(values(WORDS[name])))
    assert made.dtype == WORDS[name]


@pytest.mark.parametrize("name", ["u32", "u64"])
def test_fields_are_inserted_and_cut_at_the_highest_bit(name):
    width = 8 * WORDS[name].itemsize
    word, place, length = fields(values(WORDS[name]))

    def reference(a: int, b: int, position: int, length: int) -> int:
        bits, position, length = bits_of(b, width), position & 255, length & 255
        for i in range(min(length, width - position)):
            bits[position + i] = a >> i & 1
        return number(bits)

    check(bitfields.bfi, reference, [word, np.roll(word, 7), place, length])


@pytest.mark.parametrize("name", WORDS)
def test_bits_are_found_and_counted(name):
    a, width = values(WORDS[name]), 8 * WORDS[name].itemsize

    def highest(x: int) -> int:
        return ((~x if x < 0 else x).bit_length() - 1) % 2**32

    assert check(bitfields.bfind, highest, [a]).dtype == np.uint32
    check(bitfields.bfind, lambda x: width - 1 - highest(x) if highest(x) < 64 else 2**32 - 1, [a], True)
    assert check(bitfields.clz, lambda x: width - (x % 2**width).bit_length(), [a]).dtype == np.uint32
    assert check(bitfields.popc, lambda x: (x % 2**width).bit_count(), [a]).dtype == np.uint32
    check(bitfields.brev, lambda x: number(bits_of(x, width)[::-1]), [a])
    powers = np.array([(1 << i) - j for i in range(1, width) for j in (0, 1)], f"u{width // 8}")
    check(bitfields.clz, lambda x: width - x.bit_length(), [powers])


def test_the_nth_set_bit_is_found_from_a_base():
    rng = np.random.default_rng(2)
    mask = np.concatenate([rng.integers(0, 2**32, 500, dtype=np.uint32), np.uint32([0xAAAAAAAA] * 100)])
    base = rng.integers(0, 32, 600, dtype=np.uint32)
    offset = rng.integers(-20, 21, 600).astype(np.int32)

    def reference(m: int, start: int, n: int) -> int:
        if n == 0:
            return start if m >> start & 1 else 2**32 - 1
        places = range(start, 32) if n > 0 else range(start, -1, -1)
        found = [place for place in places if m >> place & 1]
        return found[abs(n) - 1] if abs(n) <= len(found) else 2**32 - 1

    check(bitfields.fns, reference, [mask, base, offset])
    found = [
        int(bitfields.fns(np.uint32(0xAAAAAAAA), np.uint32(at), np.int32(n))) for at, n in ((3, 1), (3, -1), (2, -1))
    ]
    assert found == [3, 3, 1]


@pytest.mark.parametrize("clamp", [False, True])
def test_masks_and_extensions_wrap_or_clamp(clamp):
    position, width = (x.ravel() for x in np.meshgrid(PLACES, PLACES))

    def mask(at: int, count: int) -> int:
        at, count = (at, count) if clamp else (at % 32, count % 32)
        return ((1 << min(count, 64)) - 1 << at) % 2**32 if at < 32 else 0

    check(bitfields.bmsk, mask, [position, width], clamp)
    assert bitfields.bmsk(np.uint32(1), np.uint32(2), clamp) == 6
    for dtype in (np.dtype(np.int32), np.dtype(np.uint32)):
        word, count = (x.ravel() for x in np.meshgrid(values(dtype), PLACES))

        def extended(x: int, n: int, signed: bool = dtype.kind == "i") -> int:
            n = min(n, 32) if clamp else n % 32
            low = x % (1 << n)
            return low - (1 << n) if signed and n and low >> (n - 1) else low

        made = check(bitfields.szext, extended, [word, count], clamp)
        assert made.dtype == dtype


def test_every_table_of_lop3():
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(0, 2**32, (3, 20), dtype=np.uint32)
    for table in range(256):
        wanted = [
            number([table >> (4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1)) & 1 for i in range(32)])
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        made = np.broadcast_to(bitfields.lop3(a, b, c, table), a.shape)
        assert made.tolist() == wanted and made.dtype == np.uint32, table
        single = bitfields.lop3(a[0], b[0], c[0], table)
        assert isinstance(single, np.uint32) and single == wanted[0]
    assert bitfields.lop3(np.uint32(0xF0), np.uint32(0xCC), np.uint32(0xAA), 0xE8) == 0xE8
    with pytest.raises(ValueError, match="table: expected 0 to 255, got 256"):
        bitfields.lop3(a, b, c, 256)


def chosen(a: int, b: int, selector: int) -> int:
    pair, made = a | b << 32, 0
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        byte = pair >> (8 * (nibble & 7)) & 255
        made |= (255 * (byte >> 7) if nibble & 8 else byte) << (8 * place)
    return made


def test_bytes_are_permuted_by_any_selector():
    rng = np.random.default_rng(4)
    a, b = rng.integers(0, 2**32, (2, 3000), dtype=np.uint32)
    selectors = rng.integers(0, 2**32, 3000, dtype=np.uint32)
    wanted = [chosen(x, y, s) for x, y, s in zip(a.tolist(), b.tolist(), selectors.tolist(), strict=True)]
    assert bitfields.prmt(a, b, selectors).tolist() == wanted
    for selector in [0x5410, 0x7632, 0x3210, 0x0123, 0x8888, 0xFFFF, 0x4321, 0x1111, *selectors[:200].tolist()]:
        made = bitfields.prmt(a[:9], b[:9], np.uint32(selector))
        assert made.dtype == np.uint32
        assert made.tolist() == [chosen(x, y, selector) for x, y in zip(a[:9].tolist(), b[:9].tolist(), strict=True)]
        single = bitfields.prmt(a[0], b[0], np.uint32(selector))
        assert isinstance(single, np.uint32) and single == made[0]


def test_the_modes_of_prmt_are_those_of_the_table_in_the_isa():
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
        assert bitfields.prmt(a, b, np.arange(8, dtype=np.uint32), mode).tolist() == words * 2
    with pytest.raises(ValueError, match="mode: expected one of f4e"):
        bitfields.prmt(a, b, np.uint32(0), "f5e")
