"""Integer instructions of PTX against Python's integers, at every width and beyond the width."""

from __future__ import annotations

import numpy as np
import pytest

from rooflab.bench.ptx.numbers import integers

TYPES = {f"{sign}{bits}": np.dtype(f"{code}{bits // 8}") for sign, code in ("si", "uu") for bits in (16, 32, 64)}
COUNTS = np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def values(dtype: np.dtype, seed: int, count: int = 400) -> np.ndarray:
    """Random integers of all sizes and the ends."""
    rng, info = np.random.default_rng(seed), np.iinfo(dtype)
    wild = rng.integers(info.min, info.max, count, dtype=dtype, endpoint=True)
    small = wild >> rng.integers(0, info.bits, count).astype(dtype)
    ends = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, info.max // 2 + 1], dtype)
    if info.min:
        ends = np.append(ends, np.array(-1, dtype))
    mixed = np.concatenate([wild, small, ends, np.repeat(ends, ends.size), np.tile(ends, ends.size)])
    return np.concatenate([mixed, rng.permutation(mixed)])


def wrapped(x: int, dtype: np.dtype) -> int:
    info = np.iinfo(dtype)
    return (x - info.min) % (1 << info.bits) + info.min


def clamped(x: int) -> int:
    return min(max(x, -(2**31)), 2**31 - 1)


def check(function, reference, operands, dtype, *more) -> None:
    """Vectors against Python's integers; scalars against vectors; a scalar beside vectors."""
    made = function(*operands, *more)
    assert made.dtype == dtype and made.shape == operands[0].shape
    rows = list(zip(*(x.tolist() for x in operands), strict=True))
    wanted = [wrapped(reference(*row), dtype) for row in rows]
    wrong = [(row, got, want) for row, got, want in zip(rows, made.tolist(), wanted, strict=True) if got != want]
    assert not wrong, wrong[:3]
    for lane in range(0, made.size, max(1, made.size // 25)):
        single = function(*(x[lane] for x in operands), *more)
        assert type(single) is dtype.type and single == made[lane]
    if len(operands) > 1:
        mixed = function(operands[0][3], *operands[1:], *more)
        assert mixed.tolist() == function(np.full_like(operands[0], operands[0][3]), *operands[1:], *more).tolist()
        assert mixed.dtype == dtype


def three(dtype: np.dtype) -> list[np.ndarray]:
    return [values(dtype, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("name", TYPES)
def test_products_keep_the_upper_half(name):
    dtype = TYPES[name]
    bits = 8 * dtype.itemsize
    a, b, c = three(dtype)
    check(integers.mul_hi, lambda x, y: (x * y) >> bits, [a, b], dtype)
    check(integers.mad_hi, lambda x, y, z: ((x * y) >> bits) + z, [a, b, c], dtype)
    if bits < 64:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        check(integers.mul_wide, lambda x, y: x * y, [a, b], wide)


@pytest.mark.parametrize("name", ["s32", "u32"])
def test_products_of_24_bits_take_the_low_bits_of_their_operands(name):
    dtype = TYPES[name]
    a, b, c = three(dtype)

    def low24(x: int) -> int:
        return (x + 2**23) % 2**24 - 2**23 if name == "s32" else x % 2**24

    check(integers.mul24, lambda x, y: low24(x) * low24(y), [a, b], dtype)
    check(integers.mul24, lambda x, y: (low24(x) * low24(y)) >> 16, [a, b], dtype, True)
    check(integers.mad24, lambda x, y, z: low24(x) * low24(y) + z, [a, b, c], dtype)
    check(integers.mad24, lambda x, y, z: ((low24(x) * low24(y)) >> 16) + z, [a, b, c], dtype, True)


def test_saturating_sums_stop_at_the_ends():
    a, b, c = three(TYPES["s32"])
    check(integers.add_sat_s32, lambda x, y: clamped(x + y), [a, b], TYPES["s32"])
    check(integers.sub_sat_s32, lambda x, y: clamped(x - y), [a, b], TYPES["s32"])
    check(integers.mad_hi, lambda x, y, z: clamped(((x * y) >> 32) + z), [a, b, c], TYPES["s32"], True)
    top = integers.mad24(np.int32(2**23 - 1), np.int32(2**23 - 1), np.int32(2**31 - 1), True, True)
    assert top == 2**31 - 1


@pytest.mark.parametrize("name", TYPES)
def test_quotients_are_truncated_and_zero_divides_into_all_ones(name):
    dtype = TYPES[name]
    a, b, c = three(dtype)

    def quotient(x: int, y: int) -> int:
        return -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    check(integers.div, quotient, [a, b], dtype)
    check(integers.rem, lambda x, y: -1 if y == 0 else x - quotient(x, y) * y, [a, b], dtype)
    check(integers.sad, lambda x, y, z: z + abs(x - y), [a, b, c], dtype)


@pytest.mark.parametrize("name", TYPES)
def test_extremes(name):
    dtype = TYPES[name]
    a, b, _ = three(dtype)
    check(integers.imin, min, [a, b], dtype)
    check(integers.imax, max, [a, b], dtype)
    if dtype.kind == "i":
        check(integers.imin, lambda x, y: max(min(x, y), 0), [a, b], dtype, True)
        check(integers.imax, lambda x, y: max(x, y, 0), [a, b], dtype, True)


@pytest.mark.parametrize("name", TYPES)
def test_shifts_by_the_width_and_more_leave_zeros_or_the_sign(name):
    dtype = TYPES[name]
    a = values(dtype, 5)
    a = np.repeat(a[: a.size // 4], COUNTS.size)
    count = np.tile(COUNTS, a.size // COUNTS.size)
    check(integers.shl, lambda x, n: x << min(n, 70), [a, count], dtype)
    check(integers.shr, lambda x, n: x >> min(n, 70), [a, count], dtype)
    for n in COUNTS:
        assert integers.shr(a, n).tolist() == [x >> min(int(n), 70) for x in a.tolist()]
        assert integers.shl(a, n).dtype == dtype


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_funnel_shifts_take_bits_of_two_words(left, clamp):
    low, high, _ = three(TYPES["u32"])
    count = np.resize(COUNTS, low.size)

    def shifted(x: int, y: int, n: int) -> int:
        n = min(n, 32) if clamp else n % 32
        return ((y << 32 | x) << n) >> 32 if left else (y << 32 | x) >> n

    check(integers.shf, shifted, [low, high, count], TYPES["u32"], left, clamp)


def split(x: int, size: int, signed: bool) -> list[int]:
    words = [(x >> place) % (1 << size) for place in range(0, 32, size)]
    return [w - (1 << size) if signed and w >> (size - 1) else w for w in words]


@pytest.mark.parametrize("b_signed", [False, True])
@pytest.mark.parametrize("a_signed", [False, True])
def test_dot_products_of_bytes_and_halves(a_signed, b_signed):
    operands = three(TYPES["u32"])

    def bytes_of(x: int, y: int, z: int) -> int:
        return z + sum(p * q for p, q in zip(split(x, 8, a_signed), split(y, 8, b_signed), strict=True))

    check(integers.dp4a, bytes_of, operands, TYPES["u32"], a_signed, b_signed)
    for high in (False, True):

        def halves_of(x: int, y: int, z: int, start: int = 2 * high) -> int:
            chosen = split(y, 8, b_signed)[start : start + 2]
            return z + sum(p * q for p, q in zip(split(x, 16, a_signed), chosen, strict=True))

        check(integers.dp2a, halves_of, operands, TYPES["u32"], a_signed, b_signed, high)


@pytest.mark.parametrize("name", ["s32", "u32", "s64", "u64"])
def test_sums_and_differences_carry(name):
    dtype = TYPES[name]
    a, b, c = three(dtype)
    bits = 8 * dtype.itemsize
    word = np.dtype(f"u{dtype.itemsize}")
    unsigned = [x.view(word).tolist() for x in (a, b, c)]
    for carry_in in (np.bool_(False), np.bool_(True), np.arange(a.size) % 2 == 0):
        ins = np.broadcast_to(carry_in, a.shape).tolist()
        total, out = integers.add_carry(a, b, carry_in)
        exact = [x + y + n for x, y, n in zip(*unsigned[:2], ins, strict=True)]
        assert total.dtype == word and out.dtype == np.bool_
        assert total.tolist() == [x % 2**bits for x in exact] and out.tolist() == [x >= 2**bits for x in exact]
        rest, out = integers.sub_borrow(a, b, carry_in)
        exact = [x - y - n for x, y, n in zip(*unsigned[:2], ins, strict=True)]
        assert rest.tolist() == [x % 2**bits for x in exact] and out.tolist() == [x < 0 for x in exact]
        for high in (False, True):
            total, out = integers.mad_carry(a, b, c, high, carry_in)
            products = [x * y >> (bits if high else 0) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
            exact = [p % 2**bits + z + n for p, z, n in zip(products, unsigned[2], ins, strict=True)]
            assert total.tolist() == [x % 2**bits for x in exact] and out.tolist() == [x >= 2**bits for x in exact]
    total, out = integers.add_carry(a[0], b[0])
    assert isinstance(total, word.type) and isinstance(out, np.bool_)


def test_a_chain_of_carries_multiplies_128_bits():
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0, 2**64, 50, dtype=np.uint64) for _ in range(2))
    low = [np.uint32(0xFFFFFFFF) & x.astype(np.uint32) for x in (a, b)]
    high = [(x >> np.uint64(32)).astype(np.uint32) for x in (a, b)]
    r0 = low[0] * low[1]
    r1, c1 = integers.mad_carry(low[0], low[1], low[0] * high[1], True)
    r2, _ = integers.mad_carry(low[0], high[1], high[0] * high[1], True, c1)
    r1, c1 = integers.mad_carry(high[0], low[1], r1, False)
    r2, c2 = integers.mad_carry(high[0], low[1], r2, True, c1)
    made = [x | y << 32 | z << 64 for x, y, z in zip(r0.tolist(), r1.tolist(), r2.tolist(), strict=True)]
    assert made == [x * y % 2**96 for x, y in zip(a.tolist(), b.tolist(), strict=True)] and c2.any()
