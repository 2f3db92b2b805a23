"""Which bytes a tiled TMA copy moves: the addresses of a box in global and in shared memory.

PTX ISA 8.7, "Tensors" and `cp.async.bulk.tensor`: a box is dense in shared memory, its first dimension fastest, and
swizzled on the bits of the shared address itself; what lies outside of the tensor is filled on loads and left alone on
stores.  All that does not depend on the coordinates is cached, so a tile of a loop costs two additions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rooflab.bench.ptx.tiles.swizzle import CHUNK_BYTES, PERIOD, swizzled
from rooflab.bench.ptx.tiles.tensor_map import TensorMap

ALIGNMENT = 128
"""Bytes: a box starts at a multiple of it in shared memory."""


@dataclass(frozen=True)
class TileIndex:
    """A box as `n` units of `unit_bytes` bytes, each whole inside or whole outside of the tensor."""

    global_addresses: np.ndarray
    """(n,) int64, multiples of `unit_bytes`; meaningless where a unit is outside."""
    shared_addresses: np.ndarray
    """(n,) int64, bytes, every one of the box once."""
    inside: np.ndarray | None
    """(n,) bool; None where all are inside."""
    unit_bytes: int
    """16, or less where the coordinates or the tensor's edge cut a 16-byte chunk; never less than an element."""


def tile_index(tensor: TensorMap, coords: Sequence[int], shared_address: int) -> TileIndex:
    """The box that starts at element `coords` (one signed number a dimension) and at `shared_address` (bytes).

    Raises `ValueError` on another number of coordinates, on a shared address that is not a multiple of 128, and on rows
    narrower than the swizzle, for which no layout is documented.
    """
    if len(coords) != tensor.rank:
        raise ValueError(f"coords: expected {tensor.rank}, got {len(coords)}")
    if shared_address % ALIGNMENT:
        raise ValueError(f"shared_address: expected a multiple of {ALIGNMENT}, got {shared_address:#x}")
    starts = [int(coord) for coord in coords]
    size = tensor.element_bytes
    whole = [
        start >= 0 and start + (count - 1) * step < extent
        for start, count, step, extent in zip(starts, tensor.counts, tensor.steps, tensor.dims, strict=True)
    ]
    unit = math.gcd(CHUNK_BYTES, starts[0] * size, 0 if whole[0] else tensor.dims[0] * size)
    phase = shared_address % PERIOD
    origin = tensor.address + starts[0] * size
    origin += sum(start * stride for start, stride in zip(starts[1:], tensor.strides, strict=True))
    global_offsets, shared_offsets = _offsets(tensor, unit, phase)
    return TileIndex(
        global_offsets + origin,
        shared_offsets + (shared_address - phase),
        None if all(whole) else _inside(tensor, starts, unit),
        unit,
    )


@lru_cache(maxsize=1024)
def _offsets(tensor: TensorMap, unit: int, phase: int) -> tuple[np.ndarray, np.ndarray]:
    """Global addresses from that of the first element, and shared ones for a box that starts at `phase`."""
    if 0 < tensor.row_bytes < tensor.swizzle:
        raise ValueError(f"box: expected rows of the {tensor.swizzle} bytes of the swizzle, got {tensor.row_bytes}")
    offsets = np.arange(0, tensor.row_bytes, unit, dtype=np.int64)
    for count, step, stride in zip(tensor.counts[1:], tensor.steps[1:], tensor.strides, strict=True):
        offsets = np.add.outer(np.arange(count, dtype=np.int64) * (step * stride), offsets)
    shared = phase + np.arange(0, tensor.box_bytes, unit, dtype=np.int64)
    return offsets.reshape(-1), swizzled(shared, tensor.swizzle)


def _inside(tensor: TensorMap, starts: Sequence[int], unit: int) -> np.ndarray:
    """Which units lie inside of the tensor (n,)."""
    size = tensor.element_bytes
    places = np.arange(0, tensor.row_bytes, unit, dtype=np.int64) + starts[0] * size
    inside = (places >= 0) & (places < tensor.dims[0] * size)
    rest = zip(starts[1:], tensor.counts[1:], tensor.steps[1:], tensor.dims[1:], strict=True)
    for start, count, step, extent in rest:
        places = start + np.arange(count, dtype=np.int64) * step
        inside = np.logical_and.outer((places >= 0) & (places < extent), inside)
    return inside.reshape(-1)
