"""Swizzled shared-memory addresses, and shared memory seen as 16-byte chunks.

A swizzle permutes the 16-byte chunks within 1024, 512 or 256 bytes; it moves no byte out of its chunk.  So whoever
reads whole chunks (ldmatrix, wgmma, TMA) gathers one item a chunk instead of one an element.
"""

from __future__ import annotations

import numpy as np

CHUNK_BYTES = 16
"""Bytes that a swizzle moves together."""
CHUNK = np.dtype(np.complex128)
"""A 16-byte item that NumPy moves without looking into it.

512 of them are gathered in 0.7 us and scattered in 1.2 us; the same bytes as 16-bit elements take 5.7 and 8.2 us.
"""
PERIOD = 1024
"""Bytes after which every swizzle repeats."""
SPANS = (0, 32, 64, 128)
"""Bytes within which chunks are permuted; 0 is no swizzle."""


def swizzled(addresses: np.ndarray, span: int, base_offset: int = 0) -> np.ndarray:
    """Where the bytes at linear `addresses` (bytes, integer) of shared memory lie under a swizzle of `span` bytes.

    PTX ISA 8.7, "Tensor swizzling modes": chunk bits 4 up to 6, 5 or 4 (span 128, 64, 32) are combined by exclusive
    or with the address bits from 7 up.  `base_offset` is that of a wgmma descriptor, bits 7 to 9 of the address where
    the pattern starts; it is subtracted from the row first.  Raises `ValueError` on another span.
    """
    if span not in SPANS:
        raise ValueError(f"span: expected one of {SPANS} bytes, got {span}")
    if not span:
        return addresses
    rows = (addresses >> 7) - base_offset
    moved: np.ndarray = addresses ^ ((rows & (span // CHUNK_BYTES - 1)) << 4)
    return moved


def chunks(memory: np.ndarray) -> np.ndarray:
    """`memory` (bytes, uint8, contiguous) as its 16-byte chunks (bytes // 16, `CHUNK`), sharing the bytes.

    Raises `ValueError` where it does not consist of whole chunks.
    """
    if memory.size * memory.itemsize % CHUNK_BYTES:
        raise ValueError(f"memory: expected a multiple of 16 bytes, got {memory.size * memory.itemsize}")
    return memory.view(CHUNK)
