"""Computes addresses of matrices in shared memory: swizzles, rows of ldmatrix and stmatrix, operands of wgmma.

A swizzle permutes 16-byte chunks.  ldmatrix, wgmma and TMA read whole chunks.  So this code gathers chunks instead of
elements.

ldmatrix and stmatrix (PTX ISA 8.7, "Warp-level matrix load instruction: ldmatrix" and "... store ... stmatrix"): lane
`8 * i + r` gives the address of row `r` of matrix `i`; a row is 16 bytes.  In register `i`, lane `4 * g + t` holds
elements `2 * t` and `2 * t + 1` of row `g` (.trans: column `g`).

wgmma ("Asynchronous Warpgroup Level Matrix Shared Memory Layout"): `leading` and `stride` are the two byte offsets in
the descriptor.  `W` is the width of the swizzle in chunks (8, 4 or 2), or 1 without a swizzle.

In K-major order, each row has two chunks (32 bytes of K).  The distances before the swizzle are:

- between rows: `16 * W` bytes;
- between groups of 8 rows: `stride`;
- between a row's two chunks: 16 bytes, or `leading` without a swizzle.

In MN-major order, all types have 2 bytes.  Chunk `c` of column `k` holds rows `8 * c` to `8 * c + 7`.  K has 16
columns.  The byte offset of the chunk, before the swizzle, is:

- with a swizzle: `(c % W) * 16 + (c // W) * leading + (k % 8) * 16 * W + (k // 8) * stride`;
- without a swizzle: `c * stride + (k % 8) * 16 + (k // 8) * leading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rooflab.bench.emulator.numbers.bits import Value
from rooflab.bench.emulator.tiles.mma import ELEMENT_BYTES, RAW_DTYPES, WARP, numbers, stacked

CHUNK_BYTES = 16
"""The number of bytes that a swizzle moves together."""
CHUNK = np.dtype(np.complex128)
"""A 16-byte item that NumPy moves as a whole.

A gather of 512 items takes 0.7 us, and a scatter 1.2 us.  As 16-bit elements the same bytes take 5.7 and 8.2 us.
"""
SWIZZLE_PERIOD = 1024
"""The number of bytes after which every swizzle repeats."""
SWIZZLE_SPANS = (0, 32, 64, 128)
"""The numbers of bytes within which a swizzle permutes chunks; 0 means no swizzle."""
K_BYTES = 32
"""The bytes of K in one wgmma, whatever the type."""
_SPAN_CODES = (0, 128, 64, 32)
_MN_MAJOR_K_SIZE = 16


class OutsideMemory(ValueError):
    """Raised if a descriptor leads out of the CTA's shared memory."""


def swizzled(addresses: np.ndarray, span: int, base_offset: int = 0) -> np.ndarray:
    """Returns the addresses to which a swizzle of `span` bytes moves the bytes at linear `addresses` of shared memory.

    The address bits from 4 up are XORed with the bits from 7 up (PTX ISA 8.7, "Swizzling Modes").  A `span` of
    128 uses three bits, 64 two, 32 one, and 0 none.  Before the XOR, `base_offset` is subtracted from the bits from 7
    up; it is a field of the wgmma descriptor.  Raises `ValueError` on another span."""
    if span not in SWIZZLE_SPANS:
        raise ValueError(f"span: expected one of {SWIZZLE_SPANS} bytes, got {span}")
    if not span:
        return addresses
    row_bits = (addresses >> 7) - base_offset
    swizzled_addresses: np.ndarray = addresses ^ ((row_bits & (span // CHUNK_BYTES - 1)) << 4)
    return swizzled_addresses


def chunks(memory: np.ndarray) -> np.ndarray:
    """Returns a view of `memory` (bytes, uint8, contiguous) as 16-byte chunks: (bytes // 16,) of the dtype `CHUNK`.

    Raises `ValueError` if the size of `memory` is not a multiple of 16."""
    if memory.size * memory.itemsize % CHUNK_BYTES:
        raise ValueError(f"memory: expected a multiple of 16 bytes, got {memory.size * memory.itemsize}")
    return memory.view(CHUNK)


def rows_of(addresses: np.ndarray, num: int) -> np.ndarray:
    """Returns the byte addresses of the 16-byte rows of `num` matrices, matrix by matrix: `[num * warps * 8]`.

    `addresses` `[lanes]` has one address per lane; the first `8 * num` lanes of each warp count.  Raises `ValueError`
    if `num` is not 1, 2 or 4, on incomplete warps, and on a misaligned row."""
    if num not in (1, 2, 4):
        raise ValueError(f"num: expected 1, 2 or 4 matrices, got {num}")
    if addresses.ndim != 1 or not addresses.size or addresses.size % WARP:
        raise ValueError(f"addresses: expected whole warps of 32 lanes, got shape {addresses.shape}")
    rows: np.ndarray = addresses.reshape(-1, 4, 8)[:, :num].transpose(1, 0, 2).reshape(-1)
    if (np.bitwise_or.reduce(rows) & (CHUNK_BYTES - 1)) != 0:
        raise ValueError(f"addresses: expected rows at multiples of 16 bytes, got {rows[rows % CHUNK_BYTES != 0][0]}")
    return rows


def load_matrices(memory: np.ndarray, addresses: np.ndarray, num: int, trans: bool) -> list[np.ndarray]:
    """Runs ldmatrix for `num` matrices, with `.trans` if `trans` is true.  Returns a uint32 register `[lanes]` for
    each.

    `memory` `[bytes]` uint8 is shared memory.  `addresses` `[lanes]` are byte offsets of rows.  Raises the errors of
    `rows_of`, and `IndexError` on a row outside of `memory`."""
    rows = chunks(memory)[rows_of(addresses, num) >> 4]
    if not trans:
        return list(rows.view(np.uint32).reshape(num, addresses.size))
    transposed_rows = rows.view(np.uint16).reshape(num, -1, 8, 8).transpose(0, 1, 3, 2)
    return list(np.ascontiguousarray(transposed_rows).view(np.uint32).reshape(num, addresses.size))


def row_values(registers: Sequence[Value], lanes: int, trans: bool) -> np.ndarray:
    """Returns the 16-byte rows that stmatrix stores: `[warps * 8 * registers]` of dtype `CHUNK`.

    The rows are in the order of the lanes that give their addresses.  A register is uint32 `[lanes]`, or one value for
    all lanes.  `trans` means `.trans`.  Raises `ValueError` unless there are 1, 2 or 4 registers.
    """
    register_count = len(registers)
    if register_count not in (1, 2, 4):
        raise ValueError(f"registers: expected 1, 2 or 4 matrices, got {register_count}")
    row_words = stacked(registers, lanes, np.uint32)
    if trans:
        transposed_rows = row_words.view(np.uint16).reshape(register_count, -1, 8, 8).transpose(0, 1, 3, 2)
        row_words = np.ascontiguousarray(transposed_rows)
    rows: np.ndarray = row_words.reshape(-1).view(CHUNK).reshape(register_count, -1, 8).transpose(1, 0, 2).reshape(-1)
    return rows


@lru_cache(maxsize=8192)
def operand_chunks(bits: int, rows: int, mn_major: bool) -> tuple[np.ndarray, int]:
    """Returns where the 16-byte chunks of a wgmma's operand lie in shared memory, as indices (address / 16).  Also
    returns the highest index.

    `bits` is the operand's 64-bit matrix descriptor (PTX ISA 8.7, "Matrix Descriptor Format").  Address, leading offset
    and stride offset start at bits 0, 16 and 32: 14 bits each, in units of 16 bytes.  Bits 49 to 51 are the base
    offset: bits 7 to 9 of the address where the swizzle's pattern starts.  Bits 62 and 63 code the swizzle: none, 128,
    64 or 32 bytes.

    In K-major order the indices are `[rows, 2]`, because each row has two chunks.  In MN-major order they are
    `[16, rows // 8]`: for each of 16 columns, one chunk per 8 rows.  Raises `ValueError` if `rows` is not a multiple
    of 8."""
    if rows <= 0 or rows % 8:
        raise ValueError(f"rows: expected a multiple of 8, got {rows}")
    start, leading, stride = ((bits >> first_bit & 0x3FFF) << 4 for first_bit in (0, 16, 32))
    base_offset, span = bits >> 49 & 7, _SPAN_CODES[bits >> 62 & 3]
    width = max(1, span // CHUNK_BYTES)
    if not mn_major:
        row, half_index = np.arange(rows)[:, None], np.arange(2)[None, :]
        chunk_stride = CHUNK_BYTES if span else leading
        linear_offsets = row % 8 * (CHUNK_BYTES * width) + row // 8 * stride + half_index * chunk_stride
    else:
        chunk, k = np.arange(rows // 8)[None, :], np.arange(_MN_MAJOR_K_SIZE)[:, None]
        chunk_step, k_step = (leading, stride) if span else (stride, leading)
        linear_offsets = (
            chunk % width * CHUNK_BYTES + chunk // width * chunk_step + k % 8 * (CHUNK_BYTES * width) + k // 8 * k_step
        )
    chunk_numbers = swizzled(start + linear_offsets, span, base_offset) // CHUNK_BYTES
    chunk_numbers.flags.writeable = False
    return chunk_numbers, int(chunk_numbers.max())


def read_operand(memory: np.ndarray, bits: int, rows: int, element: str, mn_major: bool = False) -> np.ndarray:
    """Reads a wgmma operand as float32 `[rows, K]` from shared memory: A (64 rows) or the transposed B (N rows).

    `memory` `[bytes]` uint8 is one CTA's shared memory, and `bits` is the descriptor.  `element` is the PTX type of the
    elements.  Raises `OutsideMemory` if the operand is not inside `memory`.  With `mn_major`, raises `ValueError`
    unless an element has 2 bytes."""
    element_bytes = ELEMENT_BYTES[element]
    if mn_major and element_bytes != 2:
        raise ValueError(f"element: expected f16 or bf16 for an MN-major operand, got {element}")
    chunk_numbers, highest_chunk = operand_chunks(bits, rows, mn_major)
    memory_chunks = chunks(memory)
    if highest_chunk >= memory_chunks.size:
        raise OutsideMemory(f"descriptor {bits:#x}: reads up to byte {highest_chunk * 16 + 15} of {memory.size}")
    raw_operand = memory_chunks[chunk_numbers].view(RAW_DTYPES[element_bytes])
    element_values = numbers(raw_operand, element)
    return element_values.T if mn_major else element_values
