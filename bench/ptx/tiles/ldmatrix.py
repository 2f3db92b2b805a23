"""ldmatrix and stmatrix: 8x8 matrices of 16-bit elements between shared memory and registers.

PTX ISA 8.7, "Warp-level matrix load instruction: ldmatrix" and "... store ... stmatrix": lane 8 * i + r gives the
address of row r of matrix i, a row is 16 bytes; lane 4 * g + t holds elements 2 * t and 2 * t + 1 of row g (.trans: of
column g) of matrix i in register i, the lower half first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value
from rooflab.bench.ptx.tiles.fragments import WARP, stacked
from rooflab.bench.ptx.tiles.swizzle import CHUNK, CHUNK_BYTES, chunks


def rows_of(addresses: np.ndarray, num: int) -> np.ndarray:
    """Start addresses (bytes) of the rows that are touched (num * warps * 8,), 16 bytes each, matrix by matrix.

    `addresses` (lanes,) is what each lane gives; only the first 8 * num of a warp count.  Raises `ValueError` where
    `num` is not 1, 2 or 4, the lanes are not whole warps, or a row does not start at a multiple of 16.
    """
    if num not in (1, 2, 4):
        raise ValueError(f"num: expected 1, 2 or 4 matrices, got {num}")
    if addresses.ndim != 1 or not addresses.size or addresses.size % WARP:
        raise ValueError(f"addresses: expected whole warps of 32 lanes, got shape {addresses.shape}")
    rows: np.ndarray = addresses.reshape(-1, 4, 8)[:, :num].transpose(1, 0, 2).reshape(-1)
    if (np.bitwise_or.reduce(rows) & (CHUNK_BYTES - 1)) != 0:
        raise ValueError(f"addresses: expected rows at multiples of 16 bytes, got {rows[rows % CHUNK_BYTES != 0][0]}")
    return rows


def load(memory: np.ndarray, addresses: np.ndarray, num: int, trans: bool) -> list[np.ndarray]:
    """ldmatrix.x`num`, with `.trans` or without: registers (lanes,) uint32, one per matrix.

    `memory` (bytes,) uint8 is shared memory, `addresses` (lanes,) the row each lane gives, in bytes from its start.
    Raises as `rows_of`, and `IndexError` on a row outside of memory.
    """
    rows = chunks(memory)[rows_of(addresses, num) >> 4]
    if not trans:
        return list(rows.view(np.uint32).reshape(num, addresses.size))
    turned = rows.view(np.uint16).reshape(num, -1, 8, 8).transpose(0, 1, 3, 2)
    return list(np.ascontiguousarray(turned).view(np.uint32).reshape(num, addresses.size))


def row_values(registers: Sequence[Value], lanes: int, trans: bool) -> np.ndarray:
    """stmatrix.x(number of registers), with `.trans` or without: the rows (warps * 8 * number,) of 16 bytes (`CHUNK`).

    They are in the order of the lanes that say where they go, the first 8 * number of each warp.  Registers are
    (lanes,) uint32, or one value for all lanes.  Raises `ValueError` where they are not 1, 2 or 4.
    """
    num = len(registers)
    if num not in (1, 2, 4):
        raise ValueError(f"registers: expected 1, 2 or 4 matrices, got {num}")
    words = stacked(registers, lanes, np.uint32)
    if trans:
        turned = words.view(np.uint16).reshape(num, -1, 8, 8).transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(turned)
    found: np.ndarray = words.reshape(-1).view(CHUNK).reshape(num, -1, 8).transpose(1, 0, 2).reshape(-1)
    return found
