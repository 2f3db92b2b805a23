"""mma.sync, ldmatrix and stmatrix against loops over lanes and elements, written from the formulas of the PTX ISA."""

import numpy as np
import pytest
import torch

from rooflab.bench.emulator.numbers.formats import encode
from rooflab.bench.emulator.tiles.mma import mma
from rooflab.bench.emulator.tiles.shared_layout import load_matrices, row_values

SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f64": 8}


def place_of_a(shape, size, i, group, thread):
    if shape == "m8n8k4":
        return group, thread
    if shape == "m8n8k16":
        return group, thread * 4 + i
    if (size, shape) == (8, "m16n8k16"):
        return group + 8 * (i % 2), i // 2 * 4 + thread
    per = max(1, 4 // size)  # elements of a register
    register = i // per
    return group + 8 * (register % 2), per * thread + i % per + 4 * per * (register // 2)


def place_of_b(shape, size, i, group, thread):
    per = max(1, 4 // size)
    return per * thread + i % per + 4 * per * (i // per), group


def place_of_c(i, group, thread):
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def coded(matrix, element):
    """A matrix of exact small numbers as raw elements."""
    if element == "f64":
        return matrix.astype(np.float64)
    if element in ("s8", "u8"):
        return matrix.astype(np.int8 if element == "s8" else np.uint8).view(np.uint8)
    bits = encode(matrix.astype(np.float32), element)
    return bits.view(np.uint32) if element == "tf32" else bits


def put(matrices, place, count, per, word):
    """Registers (number, lanes), filled element by element."""
    warps = len(matrices)
    elements = np.zeros((count, 32 * warps), matrices.dtype)
    for warp, matrix in enumerate(matrices):
        for lane in range(32):
            for i in range(count):
                elements[i, 32 * warp + lane] = matrix[place(i, lane // 4, lane % 4)]
    packed = elements.reshape(count // per, per, 32 * warps).transpose(0, 2, 1)
    return list(np.ascontiguousarray(packed).view(word).reshape(count // per, 32 * warps))


def take(registers, m, dtype):
    """Accumulators (warps, m, 8), read element by element."""
    per = 4 // np.dtype(dtype).itemsize if np.dtype(dtype).itemsize < 4 else 1
    warps = registers[0].size // 32
    found = np.zeros((warps, m, 8), dtype)
    for warp in range(warps):
        for lane in range(32):
            for i in range(m // 4):
                words = registers[i // per][32 * warp + lane : 32 * warp + lane + 1].view(dtype)
                found[(warp, *place_of_c(i, lane // 4, lane % 4))] = words[i % per]
    return found


CASES = [
    *[("m16n8k16", x, x, d) for x, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("f64", "f64"))],
    *[("m16n8k8", x, x, d) for x, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("tf32", "f32"))],
    ("m16n8k8", "f64", "f64", "f64"),
    ("m16n8k4", "tf32", "tf32", "f32"),
    ("m16n8k4", "f64", "f64", "f64"),
    ("m8n8k4", "f64", "f64", "f64"),
    *[(f"m{x}", a, b, "s32") for x in ("8n8k16", "16n8k16", "16n8k32") for a in ("s8", "u8") for b in ("s8", "u8")],
    *[(f"m16n8k{k}", x, "e5m2", d) for k in (16, 32) for x in ("e4m3", "e5m2") for d in ("f32", "f16")],
]


@pytest.mark.parametrize("warps", [1, 3])
@pytest.mark.parametrize("shape,a_type,b_type,d_type", CASES)
def test_mma_is_the_product_of_the_matrices_in_the_registers(shape, a_type, b_type, d_type, warps):
    generator = np.random.default_rng(len(shape) + warps)
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    low, high = {"s8": (-128, 127), "u8": (0, 255)}.get(a_type, (-4, 4))
    a = generator.integers(low, high, (warps, m, k), endpoint=True)
    low, high = {"s8": (-128, 127), "u8": (0, 255)}.get(b_type, (-4, 4))
    b = generator.integers(low, high, (warps, k, 8), endpoint=True)
    c = generator.integers(-50, 50, (warps, m, 8))
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}[d_type]
    word = np.float64 if a_type == "f64" else np.uint32
    size = SIZES[a_type]
    per = max(1, 4 // size)

    def a_place(i, group, thread):
        return place_of_a(shape, size, i, group, thread)

    def b_place(i, group, thread):
        return place_of_b(shape, size, i, group, thread)

    a_registers = put(coded(a, a_type), a_place, m * k // 32, per, word)
    b_registers = put(coded(b, b_type), b_place, 8 * k // 32, per, word)
    c_word = {"f16": np.uint32, "s32": np.uint32}.get(d_type, dtype)
    c_registers = put(c.astype(dtype), place_of_c, m // 4, 2 if d_type == "f16" else 1, c_word)
    with np.errstate(all="ignore"):
        found = mma(shape, a_type, b_type, d_type, a_registers, b_registers, c_registers)
    wanted = torch.matmul(torch.from_numpy(a), torch.from_numpy(b)).numpy() + c
    assert all(register.dtype == c_word and register.shape == (32 * warps,) for register in found)
    assert np.array_equal(take(found, m, dtype), wanted.astype(dtype))


def test_integer_sums_wrap_around_or_saturate():
    ones = [np.uint32(0x01010101)] * 4
    top = [np.full(32, 0x7FFFFFF0, np.uint32)] * 4
    wrapped = mma("m16n8k32", "s8", "s8", "s32", ones, ones[:2], top)
    stopped = mma("m16n8k32", "s8", "s8", "s32", ones, ones[:2], top, saturate=True)
    assert all((register == np.uint32(0x80000010)).all() for register in wrapped)
    assert all((register == np.uint32(0x7FFFFFFF)).all() for register in stopped)


def loaded_word(memory, addresses, warp, lane, matrix, trans):
    """Register `matrix` of a lane after ldmatrix, from PTX's table of rows and columns."""
    halves = []
    for element in range(2):
        row, column = lane // 4, 2 * (lane % 4) + element
        if trans:
            row, column = column, row
        start = addresses[32 * warp + 8 * matrix + row] + 2 * column
        halves.append(int(memory[start]) | int(memory[start + 1]) << 8)
    return halves[0] | halves[1] << 16


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_ldmatrix_loads_what_the_table_says_and_stmatrix_puts_it_back(num, trans):
    generator = np.random.default_rng(num)
    memory = generator.integers(0, 256, 4096).astype(np.uint8)
    addresses = (generator.permutation(256)[:64] * 16).astype(np.int64)
    registers = load_matrices(memory, addresses, num, trans)
    assert len(registers) == num
    for matrix, register in enumerate(registers):
        assert register.dtype == np.uint32
        for lane in range(64):
            wanted = loaded_word(memory, addresses, lane // 32, lane % 32, matrix, trans)
            assert register[lane] == wanted
    empty = np.zeros_like(memory)
    rows = addresses[np.arange(64) % 32 < 8 * num]
    empty.view(np.complex128)[rows >> 4] = row_values(registers, 64, trans)
    touched = (rows[:, None] + np.arange(16)).reshape(-1)
    wanted_rows = [addresses[32 * warp + lane] for warp in range(2) for lane in range(8 * num)]
    assert sorted(rows) == sorted(wanted_rows)
    assert np.array_equal(empty[touched], memory[touched])
    assert np.count_nonzero(np.delete(empty, touched)) == 0
