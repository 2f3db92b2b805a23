"""Computes the matrix products of mma.sync and wgmma for many warps at once, and maps their matrices to registers.

The layouts are those of PTX ISA 8.7.  For mma.sync ("Matrix Fragments for mma.m16n8k..."), lane `4 * g + t` holds these
elements:

- A: rows `g` and `g + 8`, in alternating registers.  The four lanes with the same `g` share the row's elements.
- B: column `g`.  The four lanes with the same `g` share the column's elements.
- C, D: columns `2 * t` and `2 * t + 1` of row `g`, then of row `g + 8`.

Matrices of 8 rows (m8) have no row `g + 8`.  A register of A or B holds 4 bytes of adjacent elements along K, or one
f64.  A register of 16-bit C or D holds both columns.

For wgmma ("Matrix Fragments for wgmma.mma_async.m64nNk..."), each of the four warps holds 16 rows.  A has the layout
of mma.sync.  D has the layout of mma.sync in each block of 8 columns, one block after the other.

Products of 16-bit, tf32 and fp8 types are exact in float32.  NumPy sums them in float32 in its own order; the ISA
defines no order.  C is added last.

`truncated_wgmma` models the imprecise fp8 sums of Hopper.  DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) found that fp8
GEMM on H800 keeps about 14 bits.  The model is from MMA-Sim (arXiv 2511.10909), and agrees bit for bit with an H100.
This code itself has not been compared with a GPU.

The model finds the largest exponent of the accumulator and of all products.  It truncates each of them `F` bits below
this exponent, and adds them exactly.  Then it truncates the sum to `F` bits of mantissa.  `F` is 13 for fp8 into f32.
For the 16-bit types and tf32, MMA-Sim gives 25, and the sum keeps 23 bits.  A sum of zero is +0.  This is from
mmaemu, whose model of an H100's fp8 gives the same bits (results/fp8_oracle).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import numpy as np

from rooflab.bench.emulator.numbers.bits import Value
from rooflab.bench.emulator.numbers.formats import decode

WARP = 32
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f64": 8}
"""The element types of A and B, with the bytes of one element."""
RAW_DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.float64}
"""By bytes of an element, the NumPy type of raw elements."""
_SHAPE_PATTERN = re.compile(r"m(8|16)n8k(\d+)")
_HALF_TYPES, _FP8_TYPES, _INTEGER_TYPES = ("f16", "bf16"), ("e4m3", "e5m2"), ("s8", "u8")
_B_TYPES = {
    **{name: (name,) for name in (*_HALF_TYPES, "tf32", "f64")},
    **dict.fromkeys(_FP8_TYPES, _FP8_TYPES),
    **dict.fromkeys(_INTEGER_TYPES, _INTEGER_TYPES),
}
_D_TYPES = {
    **dict.fromkeys(("f16", *_FP8_TYPES), ("f32", "f16")),
    **dict.fromkeys(("bf16", "tf32"), ("f32",)),
    **dict.fromkeys(_INTEGER_TYPES, ("s32",)),
    "f64": ("f64",),
}
_K_SIZES = {
    **dict.fromkeys(_HALF_TYPES, (8, 16)),
    **dict.fromkeys((*_FP8_TYPES, *_INTEGER_TYPES), (16, 32)),
    "tf32": (4, 8),
    "f64": (4, 8, 16),
}
WARPGROUP = 128
WARPGROUP_ROWS = 64
FP8_FRACTION_BITS = 13
FRACTION_BITS = 25
"""The F of `truncated_wgmma`'s model for f16, bf16 and tf32."""
_MIN_EXPONENTS = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126, "f32": -126}
_ZERO_EXPONENT = -(1 << 14)
_MANTISSA_BITS = 23


def numbers(bits: np.ndarray, element: str) -> np.ndarray:
    """Converts raw elements of any shape to their exact values: float32, or float64 for f64.

    `bits` holds unsigned integers of `ELEMENT_BYTES[element]` bytes, or float64 for f64.  tf32 loses its low 13 bits,
    as in the tensor core.  8-bit integers are exact too, because sums of 32 products stay below 2**24.  Raises
    `KeyError` on an unknown type."""
    if ELEMENT_BYTES[element] == 8:
        return bits
    if element in ("s8", "u8"):
        return bits.view(np.int8 if element == "s8" else np.uint8).astype(np.float32)
    return np.asarray(decode(bits, element))


def stacked(registers: Sequence[Value], lanes: int, dtype: type[np.generic]) -> np.ndarray:
    """Stacks registers' bits into an array (registers, lanes).  A register is (lanes,), or one value for all lanes.

    Raises `ValueError` if `lanes` is not a multiple of 32, or a register has another length."""
    if lanes <= 0 or lanes % WARP:
        raise ValueError(f"lanes: expected whole warps of 32, got {lanes}")
    if all(register.shape == (lanes,) and register.dtype == registers[0].dtype for register in registers):
        # This takes half the time of the loop below.
        return np.concatenate(registers).view(dtype).reshape(len(registers), lanes)
    register_rows = np.empty((len(registers), lanes), dtype)
    for register_row, register in zip(register_rows, registers, strict=True):
        if register.shape not in ((lanes,), ()):
            raise ValueError(f"register: expected {lanes} lanes, got shape {register.shape}")
        register_row[:] = register.view(dtype)
    return register_rows


def a_matrix(registers: Sequence[Value], lanes: int, element: str, m: int = 16) -> np.ndarray:
    """Converts registers of shape `[lanes]` to the matrix A of each warp: `[warps, m, K]` float32, or float64 for f64.

    `m`, the number of rows, is 16, or 8 in the m8 shapes.  The transposed B has 8 rows, in the same layout.  K is the
    number of elements in a warp's registers divided by `m`."""
    words = stacked(registers, lanes, np.float64 if element == "f64" else np.uint32)
    row_halves, warps = m // 8, lanes // WARP
    matrix_blocks = words.reshape(-1, row_halves, warps, 8, 4).transpose(2, 1, 3, 0, 4)
    return _elements(matrix_blocks.reshape(warps, m, -1), element)


def _elements(words: np.ndarray, element: str) -> np.ndarray:
    """Unpacks the elements of type `element` from `words`, and returns their values."""
    return numbers(np.ascontiguousarray(words).view(RAW_DTYPES[ELEMENT_BYTES[element]]), element)


def spread(matrices: np.ndarray) -> np.ndarray:
    """Converts accumulators (warps, m, 8) to registers (m // 4, lanes) of the same dtype, one element per register."""
    warps, m, _ = matrices.shape
    fragments = matrices.reshape(warps, m // 8, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return fragments.reshape(m // 4, warps * WARP)


def mma(
    shape: str,
    a_type: str,
    b_type: str,
    d_type: str,
    a: Sequence[Value],
    b: Sequence[Value],
    c: Sequence[Value],
    *,
    saturate: bool = False,
    lanes: int = 0,
) -> list[np.ndarray]:
    """Computes the registers of `D = A @ B + C`.  A register has shape `[lanes]`, or is one value for all lanes.

    `shape` and types have PTX's names.  Registers of A and B are uint32, or float64 for f64.  Registers of C and D are
    float32, float64, or uint32 for s32 and packed f16.  s32 sums wrap around; with `saturate` they are clamped.

    `lanes` is used only if no register is an array.  Raises `ValueError` on a combination that PTX does not have."""
    m, reg_counts = _plan(shape, a_type, b_type, d_type)
    if (len(a), len(b), len(c)) != reg_counts:
        raise ValueError(f"{shape} {a_type}: expected {reg_counts} registers of A, B, C, got {len(a), len(b), len(c)}")
    lanes = next((register.size for register in (*a, *b, *c) if register.shape), lanes)
    product = np.matmul(a_matrix(a, lanes, a_type, m), a_matrix(b, lanes, b_type, 8).transpose(0, 2, 1))
    registers = spread(product)
    if d_type == "f16":
        accumulator = stacked(c, lanes, np.uint32).view(np.float16).reshape(m // 8, lanes, 2)
        return list(_packed(registers.reshape(m // 8, 2, lanes).transpose(0, 2, 1) + accumulator))
    if d_type == "s32":
        return list(integer_sum(registers, stacked(c, lanes, np.int32), saturate).view(np.uint32))
    registers += stacked(c, lanes, registers.dtype.type)
    return list(registers)


def _packed(pairs: np.ndarray) -> np.ndarray:
    """Converts pairs of float32 `[registers, lanes, 2]` to registers of two f16: uint32 `[registers, lanes]`."""
    return pairs.astype(np.float16, order="C").view(np.uint32)[..., 0]


def combines(a_type: str, b_type: str, d_type: str) -> bool:
    """Returns whether PTX's mma accepts these types of A, B and D together.  wgmma accepts the same, without f64."""
    return b_type in _B_TYPES.get(a_type, ()) and d_type in _D_TYPES[a_type]


def integer_sum(product: np.ndarray, old: np.ndarray, saturate: bool) -> np.ndarray:
    """Returns `product` (integers in float32) plus `old` (int32) as int32: clamped with `saturate`, else wrapped."""
    if not saturate:
        wrapped_sum: np.ndarray = product.astype(np.int32) + old
        return wrapped_sum
    s32_limits = np.iinfo(np.int32)
    clamped_sum: np.ndarray = np.clip(product.astype(np.int64) + old, s32_limits.min, s32_limits.max).astype(np.int32)
    return clamped_sum


@cache
def _plan(shape: str, a_type: str, b_type: str, d_type: str) -> tuple[int, tuple[int, int, int]]:
    """Returns the number of rows of A in an mma, and the number of registers of A, B and C per thread. Raises
    `ValueError` for an unknown shape or type."""
    shape_match = _SHAPE_PATTERN.fullmatch(shape)
    if not shape_match or not combines(a_type, b_type, d_type):
        raise ValueError(f"mma: no {shape} of {a_type} and {b_type} into {d_type}")
    m, k = int(shape_match[1]), int(shape_match[2])
    has_8_rows = (a_type == "f64" and k == 4) or (a_type in _INTEGER_TYPES and k == 16)
    if k not in _K_SIZES[a_type] or (m == 8 and not has_8_rows):
        raise ValueError(f"mma: no {shape} of {a_type}")
    a_registers = m * k * ELEMENT_BYTES[a_type] // (32 * max(4, ELEMENT_BYTES[a_type]))
    b_registers = 8 * k * ELEMENT_BYTES[b_type] // (32 * max(4, ELEMENT_BYTES[b_type]))
    return m, (a_registers, b_registers, m // (8 if d_type == "f16" else 4))


@cache
def check_shape(n: int, d_type: str, a_type: str, b_type: str, registers: int) -> None:
    """Raises `ValueError` if wgmma does not have this N or these types, or if D has a wrong number of registers."""
    if a_type == "f64" or not combines(a_type, b_type, d_type):
        raise ValueError(f"wgmma: no product of {a_type} and {b_type} into {d_type}")
    n_step = 16 if d_type == "s32" and n not in (8, 24) else 8
    if not 0 < n <= 256 or n % n_step:
        raise ValueError(f"wgmma: expected an N of 8 to 256 that {a_type} has, got {n}")
    d_registers = n // (4 if d_type == "f16" else 2)
    if registers != d_registers:
        raise ValueError(f"wgmma: expected {d_registers} registers of D for {n} columns of {d_type}, got {registers}")


def wgmma(
    d: np.ndarray | None,
    a: np.ndarray,
    b: np.ndarray,
    d_type: str = "f32",
    *,
    is_negative: bool = False,
    saturate: bool = False,
) -> np.ndarray:
    """Returns `a @ b.T + d`, or `a @ b.T` if `d` is None (scale-d is false).

    `a` is `[..., 64, K]` and `b` is `[..., N, K]`, both float32.  The result is `[..., 64, N]`: int32 for s32, else
    float32.  f16 results are rounded to f16.  s32 sums wrap around; with `saturate` they are clamped.  With
    `is_negative`, the product is subtracted.  Raises `ValueError` on any other type."""
    product: np.ndarray = np.matmul(a, np.swapaxes(b, -1, -2))
    if is_negative:
        product = -product
    if d_type == "s32":
        accumulator = np.zeros(product.shape, np.int32) if d is None else d
        return integer_sum(product, accumulator, saturate)
    if d is not None:
        product += d
    if d_type == "f32":
        return product
    if d_type == "f16":
        return product.astype(np.float16).astype(np.float32)
    raise ValueError(f"d_type: expected f32, f16 or s32, got {d_type}")


def matrix_to_registers(d: np.ndarray, d_type: str = "f32") -> np.ndarray:
    """Converts accumulators `[64, N]` or `[warpgroups, 64, N]` to registers `[number, 128 * warpgroups]`.

    For f32 and s32 there are N // 2 registers with the dtype of `d`.  For f16 there are N // 4 uint32 registers, which
    pack two f16 each."""
    n = d.shape[-1]
    matrix_blocks = d.reshape(-1, 4, 2, 8, n // 8, 4, 2)  # warpgroup, warp, half, group, block, thread, element
    lanes = matrix_blocks.shape[0] * WARPGROUP
    if d_type != "f16":
        return matrix_blocks.transpose(4, 2, 6, 0, 1, 3, 5).reshape(n // 2, lanes)
    return _packed(matrix_blocks.transpose(4, 2, 0, 1, 3, 5, 6).reshape(n // 4, lanes, 2))


def registers_to_matrix(registers: np.ndarray, d_type: str = "f32") -> np.ndarray:
    """Converts registers (number, 128 * warpgroups) to accumulators (warpgroups, 64, N).

    This is the inverse of `matrix_to_registers`.  f32 and s32 keep their dtype; f16 (uint32) becomes float32."""
    register_count, lanes = registers.shape
    if d_type != "f16":
        fragments = registers.reshape(register_count // 4, 2, 2, lanes // WARPGROUP, 4, 8, 4)
        return fragments.transpose(3, 4, 1, 5, 0, 6, 2).reshape(-1, WARPGROUP_ROWS, register_count * 2)
    f16_pairs = registers.view(np.float16).reshape(register_count // 2, 2, lanes // WARPGROUP, 4, 8, 4, 2)
    return f16_pairs.transpose(2, 3, 1, 4, 0, 5, 6).reshape(-1, WARPGROUP_ROWS, register_count * 4).astype(np.float32)


def truncated_wgmma(
    d: np.ndarray | None, a: np.ndarray, b: np.ndarray, a_type: str, b_type: str, d_type: str = "f32"
) -> np.ndarray:
    """Returns `a @ b.T + d` as one instruction of Hopper computes it, with truncated sums.  `d` may be None.

    `a` is `[M, K]`, `b` is `[N, K]`, `d` and the result are `[M, N]`, all float32.  With `d_type` f16 the result is
    rounded to f16.  Sums that are not finite in float32 are not truncated.  Raises `KeyError` on a type other than
    e4m3, e5m2, f16, bf16, tf32 or f32."""
    fraction_bits = FP8_FRACTION_BITS if a_type in ("e4m3", "e5m2") else FRACTION_BITS
    accumulator = np.zeros((a.shape[0], b.shape[0]), np.float32) if d is None else d
    a_exponents, b_exponents = _exponents(a, a_type), _exponents(b, b_type)
    max_exponents = np.maximum(_exponents(accumulator, d_type), _MIN_EXPONENTS["f32"])
    for k in range(a.shape[1]):
        np.maximum(max_exponents, a_exponents[:, k, None] + b_exponents[None, :, k], out=max_exponents)
    fraction_scale = np.ldexp(1.0, fraction_bits - max_exponents)
    cut_sum = np.trunc(accumulator.astype(np.float64) * fraction_scale)
    for k in range(a.shape[1]):
        cut_sum += np.trunc(a[:, k, None] * b[None, :, k] * fraction_scale)
    cut_sum /= fraction_scale
    rounded_sum = cut_sum.astype(np.float16) if d_type == "f16" else _cut(cut_sum, min(fraction_bits, _MANTISSA_BITS))
    float32_sum = np.matmul(a, b.T) + accumulator
    return np.where(np.isfinite(float32_sum), rounded_sum.astype(np.float32) + np.float32(0), float32_sum)


def _exponents(values: np.ndarray, element: str) -> np.ndarray:
    """Returns the binary exponent (int32) of each value of type `element`. Denormals get the exponent of the smallest
    normal number. Zero gets a still lower exponent."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _MIN_EXPONENTS[element])
    return np.where(values == 0, _ZERO_EXPONENT, exponents)


def _cut(values: np.ndarray, bits: int) -> np.ndarray:
    """Truncates float64 `values` towards zero to `bits` mantissa bits. Denormals of float32 keep fewer bits."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _MIN_EXPONENTS["f32"])
    value_scale = np.ldexp(1.0, bits - exponents)
    truncated_values: np.ndarray = np.trunc(values * value_scale) / value_scale
    return truncated_values
