"""Stamps of every granule of shared memory, and which stamps are not ordered before an instruction's accesses.

A granule has the stamp of its last write, and the stamp of the last read of each reader.

Each 1 KiB of memory, called a block here, also has the latest stamp of each reader.  A reader's clock only grows.  So
if a block's latest read is ordered before a write, all reads of the block are, and its granules need no check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.vector_clocks import (
    ACTOR,
    ACTOR_BITS,
    ASYNC,
    GENERIC,
    INIT,
    AsyncOperation,
    Stamps,
    VectorClocks,
)

BLOCK_SHIFT = 10
"""The binary logarithm of the bytes of a block of memory."""
GRANULES = (1, 2, 4, 8, 16)
"""Possible sizes of a granule in bytes; no lane accesses more bytes at once than the largest size."""

Ints = npt.NDArray[np.int64]
Value = npt.NDArray[np.generic] | np.generic
"""A value per lane (n,), or one value for all lanes; of any type of up to 8 bytes, or complex128 for 16 bytes."""
Values = Value | Sequence[Value]
"""The values of a store: one whole value per lane, or a register for each element of the store's vector."""
Bools = npt.NDArray[np.bool_]
_LANES = np.arange(1024, dtype=np.int32)


class Cells(NamedTuple):
    """The granules and memory blocks of n accesses of k granules each."""

    granules: Ints
    """The granules of each access: (n, k)."""
    blocks: Ints
    """The memory block (1 KiB) in which each access lies: (n,)."""


class Late(NamedTuple):
    """The m stamps that are not ordered before the n checked accesses."""

    access: Ints
    """For each stamp, the index of the access with which it has no order: (m,), below n."""
    granules: Ints
    """For each stamp, the granule on which it lies: (m,)."""
    stamps: Stamps
    """The stamps that are not ordered before these accesses: (m,)."""


class LastOf:
    """The stamp of the last access of each of `actors` to each of `granules`."""

    def __init__(self, actors: int, granules: int, shift: int) -> None:
        self._actors, self._granules = actors, granules
        self._stamps: Stamps = np.zeros(actors * granules, np.int64)
        blocks = (granules >> (BLOCK_SHIFT - shift)) + 1
        self._blocks: Stamps = np.zeros((blocks, actors), np.int64)
        self._flat_blocks = self._blocks.reshape(-1)

    def record(self, actors: Ints, cells: Cells, stamps: Stamps) -> None:
        """Stamps the accesses' granules, with one actor (n,) and one stamp (n,) for each access."""
        first = cells.granules + (actors * self._granules)[:, None]
        self._stamps[first] = stamps[:, None]
        self._flat_blocks[cells.blocks * self._actors + actors] = stamps

    def record_one(self, actor: int, cells: Cells, stamp: int) -> None:
        """Stamps the granules of all accesses as touched by `actor`, with one stamp."""
        self._stamps[actor * self._granules : (actor + 1) * self._granules][cells.granules] = stamp
        self._blocks[cells.blocks, actor] = stamp

    def late(self, cells: Cells, known: Stamps) -> Late | None:
        """The stamps that are not below `known` (n or 1, actors).  Returns None, the fast case, if there are none."""
        blocks = self._blocks.take(cells.blocks, axis=0) >= known
        if not blocks.any():
            return None
        access, actor = np.nonzero(blocks)
        granules = cells.granules[access]
        stamps = self._stamps[granules + (actor * self._granules)[:, None]]
        limits = np.broadcast_to(known, blocks.shape)[access, actor]
        row, column = np.nonzero(stamps >= limits[:, None])
        return Late(access[row], granules[row, column], stamps[row, column]) if row.size else None


class Shadow:
    """Stamps of `size` bytes in granules of 2 ** `shift` bytes: writes, reads, and from the first atomic, atomics."""

    def __init__(self, size: int, shift: int, readers: int, warps: int) -> None:
        self.shift = shift
        self._warps = warps
        self._count = size >> shift
        self.writes: Stamps = np.zeros(self._count, np.int64)
        self.reads = LastOf(readers, self._count, shift)
        self.atomics: LastOf | None = None
        self.winners: npt.NDArray[np.int32] = np.zeros(self._count, np.int32)
        """Scratch space: for each granule, the last access of one instruction that wrote it."""
        self._spans: dict[int, Ints] = {}

    def cells(self, addresses: npt.NDArray[np.integer], width: int) -> Cells:
        """The granules of n accesses of `width` bytes at flat byte `addresses` (n,)."""
        count = width >> self.shift
        span = self._spans.get(count)
        if span is None:
            span = self._spans[count] = np.arange(count)
        flat = addresses.astype(np.int64, copy=False)
        return Cells((flat >> self.shift)[:, None] + span, flat >> BLOCK_SHIFT)

    def all_atomics(self) -> LastOf:
        """The table `atomics`, made at the first call: most kernels have no atomics."""
        if self.atomics is None:
            self.atomics = LastOf(self._warps, self._count, self.shift)
        return self.atomics


class Lanes:
    """Accesses by lanes through the generic proxy, or with `copies` accesses by their warps' cp.async streams."""

    def __init__(
        self,
        clocks: VectorClocks,
        shadow: Shadow,
        slots: Ints | int,
        warps: Ints,
        addresses: Ints,
        width: int,
        instruction: int,
        copies: bool = False,
    ) -> None:
        self._clocks, self._shadow = clocks, shadow
        if not addresses.ndim:
            addresses = np.broadcast_to(addresses, warps.shape)
        self.cells: Cells = shadow.cells(addresses, width)
        self._rows = slots * clocks.warps + warps
        self.actors: Ints = clocks.copies + warps if copies else warps
        self.stamps: Stamps = clocks.current.take(slots * clocks.actors + self.actors) + (instruction << ACTOR_BITS)

    def late_writes(self, of_mbarrier: bool = False) -> Late | None:
        """Last writes that are not ordered before the lanes; for an mbarrier, a fence of its init is enough."""
        known = self._clocks.known[GENERIC].reshape(-1)
        stamps = self._shadow.writes.take(self.cells.granules)
        late = stamps >= known.take((stamps & ACTOR) + (self._rows * self._clocks.actors)[:, None])
        if of_mbarrier and late.any():
            known = self._clocks.known[INIT].reshape(-1)
            late &= stamps >= known.take((stamps & ACTOR) + (self._rows * self._clocks.actors)[:, None])
        return _late(late, self.cells, stamps) if late.any() else None

    def late(self, table: LastOf | None, actors: int) -> Late | None:
        """The stamps in `table` that are not ordered before the lanes.  Returns None if there is no table."""
        if table is None:
            return None
        known = self._clocks.known[GENERIC, :, :, :actors].reshape(-1, actors)
        return table.late(self.cells, known.take(self._rows, axis=0))

    def actors_of(self, late: Late) -> Ints:
        """The actor of the access that met each stamp of `late`: (m,)."""
        return self.actors[late.access]

    def but_for_proxy(self, late: Late) -> Bools:
        """Whether only a proxy fence is missing, (m,).  Always false: the generic proxy needs no such fence."""
        return np.zeros(late.access.size, np.bool_)

    def collisions(self) -> tuple[Ints, Ints] | None:
        """Pairs of accesses in one instruction to one granule: an access, and the last access.  None without pairs.

        Widths are equal and addresses aligned, so accesses overlap completely or not at all: the first granules decide.
        """
        first = self.cells.granules[:, 0]
        lanes = _LANES[: first.size] if first.size <= _LANES.size else np.arange(first.size, dtype=np.int32)
        self._shadow.winners[first] = lanes
        winners = self._shadow.winners.take(first)
        clash = winners != lanes
        if not clash.any():
            return None
        losers = np.flatnonzero(clash)
        return losers, winners[losers].astype(np.int64)

    def last_of_warp(self) -> Ints:
        """For each access, the last access that its warp makes to the same address: (n,)."""
        return last_of(self.cells.granules[:, 0] << ACTOR_BITS | self.actors)


class Operation:
    """Accesses by one asynchronous operation, through the async proxy."""

    def __init__(self, shadow: Shadow, transfer: AsyncOperation, addresses: Ints, width: int, instruction: int) -> None:
        self._shadow, self._transfer = shadow, transfer
        self.cells: Cells = shadow.cells(addresses, width)
        self.stamp = transfer.stamp + (instruction << ACTOR_BITS)

    def late_writes(self, plane: int = ASYNC) -> Late | None:
        """The last writes that are not ordered before the operation in `plane`."""
        stamps = self._shadow.writes.take(self.cells.granules)
        late = stamps >= self._transfer.known[plane].take(stamps & ACTOR)
        return _late(late, self.cells, stamps) if late.any() else None

    def late(self, table: LastOf | None, actors: int, plane: int = ASYNC) -> Late | None:
        """The stamps in `table` that are not ordered before the operation.  Returns None if there is no table."""
        if table is None:
            return None
        return table.late(self.cells, self._transfer.known[plane, None, :actors])

    def actors_of(self, late: Late) -> Ints:
        """The actor of the operation, once for each stamp of `late`: (m,)."""
        return np.full(late.access.size, self._transfer.actor)

    def but_for_proxy(self, late: Late) -> Bools:
        """Whether each stamp is ordered in the generic plane, so that only a proxy fence is missing: (m,)."""
        known = self._transfer.known[GENERIC].take(late.stamps & ACTOR)
        ordered: Bools = late.stamps < known
        return ordered


def last_of(keys: Ints) -> Ints:
    """For each of `keys` (n,), the index of the last equal key: (n,)."""
    order = keys.argsort(kind="stable")
    last: Ints = order[keys[order].searchsorted(keys, side="right") - 1]
    return last


def equal(values: Values, others: Values, accesses: int) -> Bools:
    """Whether all registers of an access hold the same bits, (accesses,).  NaNs with the same bits are equal."""
    same = np.ones(accesses, np.bool_)
    for value, other in zip(_registers(values), _registers(others), strict=True):
        same &= (_words(value) == _words(other)).all(axis=1)
    return same


ROUNDING = 2.0**-18
"""Two fp32 sums of the same tens of terms may differ by this share of the largest sum that the instruction writes, if
their terms were rounded in another order, or not at all (a fused multiply-add)."""
HALF_ROUNDING = 2.0**-8
"""The same limit for fp16, which allows four roundings.  The limit for bf16 is eight times as large."""


def nearly_equal(values: Values, others: Values, accesses: int) -> Bools:
    """Whether all registers of an access are fp32, bf16 or fp16 numbers that differ by rounding alone: (accesses,)."""
    near = np.ones(accesses, np.bool_)
    for value, other in zip(_registers(values), _registers(others), strict=True):
        alike = np.zeros(accesses, np.bool_)
        for pair in _as_floats(_columns(value), _columns(other)):
            alike |= _near(*pair)
        near &= alike
    return near


def _as_floats(value: npt.NDArray[Any], other: npt.NDArray[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Both values as numbers, a vector's registers in columns, and the largest difference that rounding may cause.  16
    bits may be fp16 or bf16; small values are taken for integers."""
    if value.itemsize % 4 == 0:
        yield value.view(np.float32), other.view(np.float32), ROUNDING
    elif value.itemsize == 2:
        halves = value.view(np.float16), other.view(np.float16), HALF_ROUNDING
        wide, others = ((each.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for each in (value, other))
        for first, second, rounding in (halves, (wide, others, 8 * HALF_ROUNDING)):
            if np.abs(np.where(np.isfinite(first), first, 0)).max(initial=0.0) >= np.finfo(np.float16).smallest_normal:
                yield first, second, rounding


def _near(a: npt.NDArray[Any], b: npt.NDArray[Any], rounding: float) -> Bools:
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
        # Not each value's own size: a sum that cancels keeps the rounding of its terms.
        scale = np.abs(np.where(np.isfinite(a), a, 0)).max(initial=0.0)
        near: Bools = (np.isfinite(a) & (np.abs(a - b) <= rounding * scale)).all(1)
    return near


def chosen(values: Values, lanes: Ints) -> Values:
    """The registers of the given lanes."""
    return [value[lanes] if isinstance(value, np.ndarray) else value for value in _registers(values)]


def _registers(values: Values) -> Sequence[Value]:
    return [values] if isinstance(values, np.ndarray | np.generic) else values


def _words(value: Value) -> npt.NDArray[np.unsignedinteger]:
    """The bits of a value as unsigned words: (n or 1, words)."""
    column = _columns(value)
    words: npt.NDArray[np.unsignedinteger] = column.view(f"u{min(column.itemsize, 8)}")
    return words


def _columns(value: Value) -> npt.NDArray[Any]:
    return np.ascontiguousarray(value).reshape(-1, 1)


def _late(late: Bools, cells: Cells, stamps: Stamps) -> Late:
    return Late(np.nonzero(late)[0], cells.granules[late], stamps[late])
