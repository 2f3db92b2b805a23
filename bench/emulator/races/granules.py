"""Divides global memory into granules: small aligned groups of bytes, which a race detector tracks together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.shadow_memory import GRANULE_SIZES, counted

Ints = npt.NDArray[np.int64]


class Granules:
    """Numbers the granules of `allocations` together, from 0 on.  An allocation is given by its base and size in bytes.
    A granule has `granule_bytes` bytes: 1, 2, 4, 8 or 16.  Raises `ValueError` on another size."""

    def __init__(self, granule_bytes: int, allocations: Iterable[tuple[int, int]]) -> None:
        if granule_bytes not in GRANULE_SIZES:
            raise ValueError(f"granule_bytes: expected 1, 2, 4, 8 or 16, got {granule_bytes}")
        self._shift = granule_bytes.bit_length() - 1
        self._bases, self._ends = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._moves = np.zeros(0, np.int64)
        self._last: tuple[Ints, int, Ints] | None = None
        for base, size in allocations:
            self._add(base, size)

    def _add(self, base: int, size: int) -> None:
        """Adds an allocation.  Allocations that overlap become one.  Raises `ValueError` on a size below one."""
        if size < 1:
            raise ValueError(f"size: expected at least 1 byte, got {size}")
        start = base >> self._shift << self._shift
        end_byte = -(-(base + size) >> self._shift) << self._shift
        is_overlapping = (start < self._ends) & (self._bases < end_byte)
        allocation_bases = np.append(self._bases[~is_overlapping], min(start, *self._bases[is_overlapping], start))
        allocation_ends = np.append(self._ends[~is_overlapping], max(end_byte, *self._ends[is_overlapping], end_byte))
        sort_order = allocation_bases.argsort()
        self._bases, self._ends = allocation_bases[sort_order], allocation_ends[sort_order]
        allocation_sizes = self._ends - self._bases
        self._moves = np.cumsum(allocation_sizes) - allocation_sizes - self._bases

    @property
    def count(self) -> int:
        """Returns the number of granules."""
        return int(((self._ends - self._bases) >> self._shift).sum())

    def of(self, addresses: Ints, width: int) -> Ints:
        """Returns the granules that each access of `width` bytes covers: `[n, granules]`.  `addresses` `[n]` must lie
        in allocations."""
        if self._last is not None and self._last[0] is addresses and self._last[1] == width:
            return self._last[2]  # two detectors ask for one access
        flat_addresses = addresses.astype(np.int64, copy=False)
        address_shifts = self._moves.take(self._bases.searchsorted(flat_addresses, side="right") - 1)
        first_granules = (flat_addresses + address_shifts) >> self._shift
        granules: Ints = first_granules[:, None] + counted(width >> self._shift or 1)
        self._last = addresses, width, granules
        return granules

    def address(self, granule: int) -> int:
        """Returns the address of the first byte of the granule with this number."""
        flat_address = granule << self._shift
        allocation_index = int((self._bases + self._moves).searchsorted(flat_address, side="right")) - 1
        return flat_address - int(self._moves[allocation_index])
