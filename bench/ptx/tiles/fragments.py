"""How the matrices of mma.sync and wgmma lie in registers: fragments to matrices and back, many warps at once.

Every layout of PTX ISA 8.7, "Matrix Fragments for mma.m16n8k...", is one rule.  Lane = 4 * group + thread, a register
holds `per` elements of a row:

- A: register 2 * step + half, element e is row 8 * half + group, column (4 * step + thread) * per + e;
- B: register step, element e is column `group`, row (4 * step + thread) * per + e;
- C, D: register 2 * half + e is row 8 * half + group, column 2 * thread + e; 16-bit ones have both in one register.

An m8 shape has no second half.  So a fragment is a matrix with its axes in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value
from rooflab.bench.ptx.numbers.formats import decode

WARP = 32
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f64": 8}
"""Element types of A and B, with the bytes of one."""
RAW: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.float64}
"""What raw elements of that many bytes are held in."""


def numbers(bits: np.ndarray, element: str) -> np.ndarray:
    """The values of raw elements (any shape; of a width in `BYTES`, unsigned, f64 as float64), exact, in float32.

    f64 stays float64.  tf32 loses its low 13 bits, as the tensor core drops them.  Integers of 8 bits become float32
    too: a sum of 32 products stays below 2**24.  Raises `KeyError` on a type that is not in `BYTES`.
    """
    if BYTES[element] == 8:
        return bits
    if element in ("s8", "u8"):
        return bits.view(np.int8 if element == "s8" else np.uint8).astype(np.float32)
    return np.asarray(decode(bits, element))


def stacked(registers: Sequence[Value], lanes: int, dtype: type[np.generic]) -> np.ndarray:
    """Registers, each (lanes,) or one value for all lanes, as one array (registers, lanes) with their bits as `dtype`.

    Raises `ValueError` where `lanes` is not whole warps or a register has another length.
    """
    if lanes <= 0 or lanes % WARP:
        raise ValueError(f"lanes: expected whole warps of 32, got {lanes}")
    if all(register.shape == (lanes,) and register.dtype == registers[0].dtype for register in registers):
        # Half the time of the loop.
        return np.concatenate(registers).view(dtype).reshape(len(registers), lanes)
    rows = np.empty((len(registers), lanes), dtype)
    for row, register in zip(rows, registers, strict=True):
        if register.shape not in ((lanes,), ()):
            raise ValueError(f"register: expected {lanes} lanes, got shape {register.shape}")
        row[:] = register.view(dtype)
    return rows


def lanes_of(*groups: Sequence[Value]) -> int:
    """Lanes of the first register that is an array; 0 where none is."""
    return next((register.size for group in groups for register in group if register.shape), 0)


def a_matrix(registers: Sequence[Value], lanes: int, element: str, m: int = 16) -> np.ndarray:
    """A of each warp (warps, m, K), float32 (float64 for f64), from its registers, each (lanes,).

    K follows from their number: registers * 32 * (4 // bytes) // m.  `m` is 16, or 8 in the m8 shapes.
    """
    words = stacked(registers, lanes, np.float64 if element == "f64" else np.uint32)
    halves, warps = m // 8, lanes // WARP
    parts = words.reshape(-1, halves, warps, 8, 4).transpose(2, 1, 3, 0, 4)
    return _elements(parts.reshape(warps, m, -1), element)


def b_matrix(registers: Sequence[Value], lanes: int, element: str) -> np.ndarray:
    """The transpose of B of each warp (warps, 8, K), float32 (float64 for f64), from its registers, each (lanes,)."""
    words = stacked(registers, lanes, np.float64 if element == "f64" else np.uint32)
    parts = words.reshape(-1, lanes // WARP, 8, 4).transpose(1, 2, 0, 3)
    return _elements(parts.reshape(lanes // WARP, 8, -1), element)


def _elements(words: np.ndarray, element: str) -> np.ndarray:
    """Values of the elements packed in `words` (contiguous; whole words keep a row together, so they moved as one)."""
    return numbers(np.ascontiguousarray(words).view(RAW[BYTES[element]]), element)


def spread(matrices: np.ndarray) -> np.ndarray:
    """Accumulators (warps, m, 8) as registers (m // 4, lanes) that hold one element each; the dtype stays."""
    warps, m, _ = matrices.shape
    parts = matrices.reshape(warps, m // 8, 8, 4, 2).transpose(1, 4, 0, 2, 3)
    return parts.reshape(m // 4, warps * WARP)


def spread_pairs(matrices: np.ndarray) -> np.ndarray:
    """Accumulators (warps, m, 8) as registers of two elements (m // 8, lanes, 2), the lower half first."""
    warps, m, _ = matrices.shape
    parts = matrices.reshape(warps, m // 8, 8, 4, 2).transpose(1, 0, 2, 3, 4)
    return parts.reshape(m // 8, warps * WARP, 2)


def gathered(registers: np.ndarray, m: int = 16) -> np.ndarray:
    """Accumulators (warps, m, 8) from registers (m // 4, lanes) of one element each: the inverse of `spread`."""
    warps = registers.shape[1] // WARP
    parts = registers.reshape(m // 8, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1)
    return parts.reshape(warps, m, 8)
