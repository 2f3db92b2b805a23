"""Operands of wgmma in shared memory: the matrix descriptor, and the matrix that it describes.

PTX ISA 8.7, "Asynchronous Warpgroup Level Matrix Shared Memory Layout".  One wgmma reads 32 bytes of K per row (K is 16
elements of 2 bytes, 8 of 4, 32 of 1), which are two 16-byte chunks in K-major; in MN-major, for 2-byte types only, a
chunk is 8 rows of one k.  With W = span / 16 (1 without a swizzle), chunks lie, before they are swizzled, at

- K-major: (row % 8) * 16 W + (row // 8) * stride + half * (16, or `leading` without a swizzle);
- MN-major, swizzled: (c % W) * 16 + (c // W) * leading + (k % 8) * 16 W + (k // 8) * stride, for chunk c = row // 8;
- MN-major, not swizzled: c * stride + (k % 8) * 16 + (k // 8) * leading.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rooflab.bench.ptx.tiles.fragments import BYTES, RAW, numbers
from rooflab.bench.ptx.tiles.swizzle import CHUNK_BYTES, chunks, swizzled

K_BYTES = 32
"""Bytes of K in one wgmma, whatever the type."""
_SPANS = (0, 128, 64, 32)
_MN_MAJOR_K = 16


@dataclass(frozen=True)
class Descriptor:
    """A matrix descriptor, in bytes."""

    start: int
    """Address in shared memory."""
    leading: int
    """Leading dimension byte offset."""
    stride: int
    """Stride dimension byte offset."""
    base_offset: int
    """Bits 7 to 9 of the address where the swizzle's pattern starts."""
    span: int
    """Bytes of the swizzle: 0, 32, 64 or 128."""


def decode_descriptor(bits: int) -> Descriptor:
    """The fields of a 64-bit descriptor.

    PTX ISA 8.7, "Matrix Descriptor Format": address, leading and stride offset from bits 0, 16 and 32, each 14 bits in
    units of 16 bytes; base offset in bits 49 to 51; swizzle in bits 62 and 63 (0 none, 1 128, 2 64, 3 32 bytes).
    """
    start, leading, stride = ((int(bits) >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    return Descriptor(start, leading, stride, int(bits) >> 49 & 7, _SPANS[int(bits) >> 62 & 3])


@lru_cache(maxsize=8192)
def operand_chunks(bits: int, rows: int, mn_major: bool) -> tuple[np.ndarray, int]:
    """Which 16-byte chunks of shared memory a wgmma reads through a descriptor, and the highest of them.

    The indices (address // 16, int64) are (rows, 2) in K-major: the chunks of one row; (16, rows // 8) in MN-major: the
    chunks of one k.  Raises `ValueError` where `rows` is not a multiple of 8.
    """
    if rows <= 0 or rows % 8:
        raise ValueError(f"rows: expected a multiple of 8, got {rows}")
    found = decode_descriptor(bits)
    width = max(1, found.span // CHUNK_BYTES)
    if not mn_major:
        row, half = np.arange(rows)[:, None], np.arange(2)[None, :]
        step = CHUNK_BYTES if found.span else found.leading
        linear = row % 8 * (CHUNK_BYTES * width) + row // 8 * found.stride + half * step
    else:
        chunk, k = np.arange(rows // 8)[None, :], np.arange(_MN_MAJOR_K)[:, None]
        groups, eights = (found.leading, found.stride) if found.span else (found.stride, found.leading)
        linear = chunk % width * CHUNK_BYTES + chunk // width * groups + k % 8 * (CHUNK_BYTES * width) + k // 8 * eights
    index = swizzled(found.start + linear, found.span, found.base_offset) // CHUNK_BYTES
    index.flags.writeable = False
    return index, int(index.max())


def read_operand(memory: np.ndarray, bits: int, rows: int, element: str, mn_major: bool = False) -> np.ndarray:
    """A (64 rows) or the transpose of B (N rows) as (rows, K) float32, from shared memory (bytes,) uint8 of one CTA.

    `element` is f16, bf16, tf32, e4m3, e5m2, s8 or u8.  In MN-major the result is a transposed view.  Raises
    `ValueError` where the descriptor points outside of memory, or on MN-major with a type not of 2 bytes.
    """
    size = BYTES[element]
    if mn_major and size != 2:
        raise ValueError(f"element: expected f16 or bf16 for an MN-major operand, got {element}")
    index, highest = operand_chunks(bits, rows, mn_major)
    items = chunks(memory)
    if highest >= items.size:
        raise ValueError(f"descriptor {bits:#x}: reads up to byte {highest * 16 + 15} of {memory.size}")
    raw = items[index].view(RAW[size])
    values = numbers(raw, element)
    return values.T if mn_major else values
