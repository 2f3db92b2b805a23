"""wgmma against loops over elements: operands in shared memory, register layouts, and sums as Hopper cuts them."""

from fractions import Fraction

import numpy as np
import pytest

from rooflab.bench.emulator.numbers.formats import decode
from rooflab.bench.emulator.tiles.mma import a_matrix, matrix_to_registers, registers_to_matrix, truncated_wgmma, wgmma
from rooflab.bench.emulator.tiles.shared_layout import read_operand

SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
MODES = {0: 0, 128: 1, 64: 2, 32: 3}


def descriptor(start, leading, stride, span, base_offset=0):
    fields = (start >> 4 & 0x3FFF) | (leading >> 4 & 0x3FFF) << 16 | (stride >> 4 & 0x3FFF) << 32
    return fields | base_offset << 49 | MODES[span] << 62


def moved(address, span, pattern_start):
    """The byte address under a swizzle whose pattern of 8 * span bytes starts at `pattern_start`."""
    if not span:
        return address
    row = (address - pattern_start) // 128
    chunk = address // 16
    return (chunk ^ (row % (span // 16))) * 16 + address % 16


def k_major(row, byte, span, leading, stride):
    """PTX's core matrices: 8 rows, each 16 bytes without a swizzle and a row of the pattern with one."""
    if not span:
        return row // 8 * stride + byte // 16 * leading + row % 8 * 16 + byte % 16
    return row // 8 * stride + row % 8 * span + byte


def mn_major(row, k, span, leading, stride):
    """Elements of 2 bytes: rows run along the pattern's row (8 of them without a swizzle), k down its 8 rows."""
    if not span:
        return row // 8 * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    return row // (span // 2) * leading + k // 8 * stride + k % 8 * span + row % (span // 2) * 2


def filled(element, rows, seed):
    """A random matrix (rows, K) of raw elements, and memory to put it in."""
    size = SIZES[element]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, rows * 32).astype(np.uint8)
    return raw.view(WORDS[size]).reshape(rows, 32 // size), generator.integers(0, 256, 1 << 16).astype(np.uint8)


def values_of(raw, element):
    if element in ("s8", "u8"):
        return raw.view(np.int8 if element == "s8" else np.uint8).astype(np.float32)
    return decode(raw, element)


def put(memory, raw, span, start, place, pattern_start=0):
    """Writes every element where the layout has it."""
    for row, elements in enumerate(raw):
        for k in range(elements.size):
            address = moved(start + place(row, k), span, pattern_start)
            memory[address : address + elements.itemsize] = elements[k : k + 1].view(np.uint8)


@pytest.mark.parametrize("rows", [8, 72, 256])
@pytest.mark.parametrize("element", SIZES)
@pytest.mark.parametrize("span", MODES)
def test_an_operand_is_read_from_where_the_layout_puts_it(span, element, rows):
    raw, memory = filled(element, rows, span + rows)
    size = SIZES[element]
    leading, stride = (4864, 144) if not span else (16, 8 * span)
    for start in (2048, 2048 + {0: 48, 32: 256, 64: 32, 128: 96}[span]):
        put(memory, raw, span, start, lambda row, k: k_major(row, k * size, span, leading, stride))
        found = read_operand(memory, descriptor(start, leading, stride, span), rows, element)
        assert found.shape == (rows, 32 // size) and found.dtype == np.float32
        assert np.array_equal(found, values_of(raw, element), equal_nan=True)
    if size == 2:
        leading, stride = (160 + 4096, 128) if not span else (64 * span, 8 * span)
        put(memory, raw, span, 3072, lambda row, k: mn_major(row, k, span, leading, stride))
        found = read_operand(memory, descriptor(3072, leading, stride, span), rows, element, mn_major=True)
        assert found.shape == (rows, 16)
        assert np.array_equal(found, values_of(raw, element), equal_nan=True)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_the_base_offset_shifts_the_pattern_of_the_swizzle(span):
    raw, memory = filled("bf16", 16, span)
    start = 1024 + 3 * 128
    put(memory, raw, span, start, lambda row, k: k_major(row, 2 * k, span, 16, 8 * span), start)
    found = read_operand(memory, descriptor(start, 16, 8 * span, span, base_offset=3), 16, "bf16")
    assert np.array_equal(found, values_of(raw, "bf16"), equal_nan=True)


def place_of_d(lane, register, element):
    """PTX: row and column of element `register` of the fragment, lane in the warpgroup."""
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + lane % 4 * 2 + element


@pytest.mark.parametrize("n", [8, 24, 256])
def test_accumulators_lie_in_registers_as_the_fragment_says(n):
    d = np.random.default_rng(n).standard_normal((2, 64, n)).astype(np.float16).astype(np.float32)
    registers, pairs = matrix_to_registers(d), matrix_to_registers(d, "f16")
    assert registers.shape == (n // 2, 256)
    assert pairs.shape == (n // 4, 256) and pairs.dtype == np.uint32
    halves = pairs.view(np.float16).reshape(n // 4, 256, 2)
    for lane in range(256):
        for register in range(n // 2):
            wanted = d[(lane // 128, *place_of_d(lane % 128, register, register % 2))]
            assert registers[register, lane] == wanted == halves[register // 2, lane, register % 2]
    assert np.array_equal(registers_to_matrix(registers), d)
    assert np.array_equal(registers_to_matrix(pairs, "f16"), d)
    assert np.array_equal(registers_to_matrix(matrix_to_registers(d[0])), d[:1])


@pytest.mark.parametrize("element", ["bf16", "tf32", "e5m2", "s8"])
def test_a_comes_from_registers_in_rows_of_16_per_warp(element):
    raw, _ = filled(element, 128, 7)
    size = SIZES[element]
    per = 4 // size
    registers = np.zeros((4, 256, per), WORDS[size])
    for lane in range(256):
        for register in range(4):
            row = lane // 32 * 16 + lane % 32 // 4 + 8 * (register % 2)
            for i in range(per):
                registers[register, lane, i] = raw[row, lane % 4 * per + 4 * per * (register // 2) + i]
    found = a_matrix(list(registers.reshape(4, -1).view(np.uint32)), 256, element)
    assert found.shape == (8, 16, 32 // size)
    assert np.array_equal(found.reshape(128, -1), values_of(raw, element), equal_nan=True)


def test_d_is_added_once_and_operands_can_be_negated():
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-8, 8, (rows, 16)).astype(np.float32) for rows in (64, 24))
    d = generator.integers(-8, 8, (64, 24)).astype(np.float32)
    kept = d.copy()
    product = a.astype(np.int64) @ b.astype(np.int64).T
    assert np.array_equal(wgmma(d, a, b), product + d)
    assert np.array_equal(wgmma(None, a, b), product)
    assert np.array_equal(wgmma(d, a, b, is_negative=True), d - product)
    assert np.array_equal(wgmma(np.stack([d, d]), np.stack([a, a]), b)[1], product + d)
    assert np.array_equal(d, kept)


def test_f16_results_are_rounded_and_s32_ones_wrap_or_saturate():
    ones = np.ones((64, 16), np.float32)
    assert (wgmma(np.full((64, 64), 2033, np.float32), ones, ones, "f16") == 2048).all()
    old = np.full((64, 64), np.iinfo(np.int32).max - 3, np.int32)
    assert (wgmma(old, ones, ones, "s32") == np.iinfo(np.int32).min + 12).all()
    assert (wgmma(old, ones, ones, "s32", saturate=True) == np.iinfo(np.int32).max).all()
    assert wgmma(None, ones, ones, "s32").dtype == np.int32


def cut(value, grid):
    """A fraction cut towards zero to a multiple of `grid`."""
    return int(value / grid) * grid


def exponent(value, lowest):
    if not value:
        return None
    power = 0
    while abs(value) >= Fraction(2) ** (power + 1):
        power += 1
    while abs(value) < Fraction(2) ** power:
        power -= 1
    return max(power, lowest)


def short_sum(d, a, b, lowest, bits):
    """One element by exact fractions: cut terms to 2**-bits of the largest exponent, add, cut the sum."""
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True) if x and y]
    tops = [exponent(x, lowest) + exponent(y, lowest) for x, y in pairs]
    old = Fraction(float(d))
    tops += [exponent(old, -126)] if old else []
    if not tops:
        return 0.0
    grid = Fraction(2) ** (max(tops) - bits)
    total = cut(old, grid) + sum(cut(x * y, grid) for x, y in pairs)
    if not total:
        return 0.0
    return float(cut(total, Fraction(2) ** (exponent(total, -126) - min(bits, 23))))


@pytest.mark.parametrize("element,lowest,bits", [("e4m3", -6, 13), ("e5m2", -14, 13), ("f16", -14, 25)])
def test_short_sums_are_those_of_exact_fractions(element, lowest, bits):
    generator = np.random.default_rng(bits)
    word = WORDS[SIZES[element]]
    codes = generator.integers(0, np.iinfo(word).max, (20, 32)).astype(word)
    values = np.nan_to_num(decode(codes, element), nan=0.5, posinf=1.0, neginf=-1.0)
    values[0] = 0
    a, b = values[:12], values[12:]
    d = (generator.standard_normal((12, 8)) * 2.0 ** generator.integers(-20, 12, (12, 8))).astype(np.float32)
    d[:, 0] = 0
    wanted = [[short_sum(d[i, j], a[i], b[j], lowest, bits) for j in range(8)] for i in range(12)]
    with np.errstate(all="ignore"):
        found = truncated_wgmma(d, a, b, element, element)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.array(wanted, np.float32))
    assert not np.array_equal(found, wgmma(d, a, b))


def test_a_short_sum_of_negative_zeros_is_a_positive_zero():
    a, b = np.full((64, 32), -0.0, np.float32), np.ones((8, 32), np.float32)
    assert not np.signbit(truncated_wgmma(np.full((64, 8), -0.0, np.float32), a, b, "e4m3", "e4m3")).any()
