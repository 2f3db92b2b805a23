"""Implements global memory: the tensors that a kernel was given, at their own addresses.

The emulated kernel reads and writes the tensors in place.  Every access is first checked against the list of
allocations.  Without this check, a wild address would reach the emulator's own memory.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.faults import Rule
from rooflab.bench.emulator.machine.view_bounds import ViewBounds

Bytes = npt.NDArray[np.uint8]
UNIT_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""Maps an access width in bytes to a NumPy type.  Complex numbers are only moved; nothing computes with them."""

SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = 1 << 60, 2 << 60, 3 << 60
"""The first generic addresses of shared, local and parameter memory.  No process has memory at these addresses."""
RANK_SHIFT = 24
"""In a shared::cluster address, the CTA's rank plus one starts at this bit; 0 there means the CTA's own memory."""
POISON = 0xFF
"""The value of each byte in memory that was never written: it makes NaN in every floating type."""
HINT_RANGE_BYTES = 1 << 16
"""A message relates a wild address to an allocation that is at most this many bytes away."""
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
"""The binary logarithm of each access width."""


def assign(view: npt.NDArray[Any], index: Any, value: Any) -> None:
    """Stores `value` in the array `view` at `index`.  `value` is a vector, or one value for all lanes."""
    if isinstance(index, int | np.generic) and isinstance(value, np.ndarray):
        value = value[-1]  # all lanes write one place: the last one wins
    view[index] = value


class BadAccess(ValueError):
    """Raised on an access at `address` that no allocation allows.  The caller adds the instruction to the message."""

    def __init__(self, text: str, address: int, rule: Rule = "out-of-bounds"):
        super().__init__(text)
        self.address = address
        self.rule = rule


def _misaligned(address: int, width: int) -> BadAccess:
    return BadAccess(f"address 0x{address:x} is not a multiple of {width} bytes", address, "misaligned")


@dataclass
class Allocation:
    """Describes a range of memory that a kernel may use."""

    name: str
    base: int
    size: int
    owner: Any
    """The object that keeps the memory alive."""
    views: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    """By access width in bytes: the memory in units of this width; see `view`."""
    written: npt.NDArray[np.bool_] | None = None
    """For each byte, whether it was written; None if all bytes were written before the launch."""
    partly_written: bool = False
    """Whether some bytes, but not all, were written before the launch."""
    read_only: bool = False
    bounds: ViewBounds | None = None
    """The views that accesses must stay in; None if all bytes may be used."""
    sectors_read: npt.NDArray[np.bool_] | None = None
    sectors_written: npt.NDArray[np.bool_] | None = None

    @property
    def end(self) -> int:
        """Returns the first address after the allocation."""
        return self.base + self.size

    def view(self, width: int) -> npt.NDArray[Any]:
        """Returns the memory in units of `width` bytes.  It begins at `base` rounded down to a multiple of `width`."""
        if width not in self.views:
            view_start = self.base // width * width
            unit_count = -(-(self.base + self.size - view_start) // width)
            # The last unit may reach past the allocation: every access is checked against the allocation's own bytes.
            memory_bytes = (ctypes.c_char * (unit_count * width)).from_address(view_start)
            self.views[width] = np.frombuffer(memoryview(memory_bytes), UNIT_DTYPES[width])
        return self.views[width]


class GlobalMemory:
    """Holds the allocations of a launch.  With `by_view`, an access to a tensor must stay among a view's elements."""

    def __init__(self, by_view: bool = False) -> None:
        self.by_view = by_view
        self.allocations: list[Allocation] = []
        self._bases: list[int] = []
        self._last: Allocation | None = None

    def add(self, name: str, base: int, size: int, owner: Any, *, read_only: bool = False) -> Allocation | None:
        """Registers `size` bytes at `base`.  A range inside a known allocation is not registered again."""
        if size <= 0:
            return None
        known_allocation = self.find(base)
        if known_allocation is not None and base + size <= known_allocation.end:
            return known_allocation
        allocation = Allocation(name, base, size, owner, read_only=read_only)
        insert_index = bisect_right(self._bases, base)
        self.allocations.insert(insert_index, allocation)
        self._bases.insert(insert_index, base)
        return allocation

    def find(self, address: int) -> Allocation | None:
        """Returns the allocation that holds `address`, or None."""
        last_allocation = self._last
        if last_allocation is not None and last_allocation.base <= address < last_allocation.end:
            return last_allocation
        base_index = bisect_right(self._bases, address) - 1
        if base_index >= 0 and address < self.allocations[base_index].end:
            self._last = self.allocations[base_index]
            return self._last
        return None

    def parts(self, addresses: npt.NDArray[Any]) -> Iterator[tuple[Allocation, npt.NDArray[np.intp]]]:
        """Yields each allocation that holds some of `addresses` `[n]`, and the indices of these addresses."""
        left = np.arange(len(addresses))
        while left.size and (allocation := self.find(int(addresses[left[0]]))) is not None:
            is_inside = (addresses[left] >= allocation.base) & (addresses[left] < allocation.end)
            yield allocation, left[is_inside]
            left = left[~is_inside]

    def locate(self, addresses: Any, width: int) -> tuple[Allocation, Any] | None:
        """Returns the allocation that holds all `addresses`, and each address as an index into this allocation.  An
        index counts units of `width` bytes.

        Returns None if the addresses lie in several allocations.  Raises `BadAccess` on an address that is misaligned
        or in no allocation."""
        first_address = int(addresses) if isinstance(addresses, np.generic) else int(addresses[0])
        allocation = self.find(first_address)
        if allocation is None:
            raise BadAccess(self._outside(first_address, width), first_address)
        view_base = allocation.base // width * width
        if isinstance(addresses, np.generic):
            if first_address % width:
                raise _misaligned(first_address, width)
            if first_address + width > allocation.end:
                raise BadAccess(self._outside(first_address, width), first_address)
            return allocation, (first_address - view_base) // width
        # Addresses below the base wrap to large numbers, so that one comparison checks both ends.
        offsets = addresses - np.uint64(allocation.base)
        if int(offsets.max()) > allocation.size - width:
            self._check_each(addresses, width)
            return None
        if width > 1:
            if int(np.bitwise_or.reduce(addresses)) & (width - 1):
                bad_address = int(addresses[(addresses & np.uint64(width - 1)) != 0][0])
                raise _misaligned(bad_address, width)
            offsets = (addresses - np.uint64(view_base)) >> np.uint64(SHIFT[width])
        return allocation, offsets.view(np.int64)

    def _check_each(self, addresses: npt.NDArray[np.uint64], width: int) -> None:
        for address in map(int, addresses):
            allocation = self.find(address)
            if allocation is None or address + width > allocation.end:
                raise BadAccess(self._outside(address, width), address)

    def _outside(self, address: int, width: int) -> str:
        base_index = bisect_right(self._bases, address) - 1
        near_ranges = self.allocations[max(0, base_index) : base_index + 2]
        alloc = min(near_ranges, key=lambda item: min(abs(address - item.base), abs(address - item.end)), default=None)
        if not address >> 12:
            return f"{width} bytes at 0x{address:x}: a null pointer, or little behind one"
        if alloc is None or min(abs(address - alloc.base), abs(address - alloc.end)) > HINT_RANGE_BYTES:
            hint_text = "if a pointer in memory led there, name its tensor (memory=)"
            return f"{width} bytes at 0x{address:x} lie far from every argument; {hint_text}"
        if address >= alloc.base:
            return (
                f"{width} bytes at 0x{address:x} begin {address - alloc.base} bytes into {alloc.name} of {alloc.size}"
            )
        return f"{width} bytes at 0x{address:x} begin {alloc.base - address} bytes before {alloc.name}"
