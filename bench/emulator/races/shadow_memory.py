"""Stores the last accesses to shared memory, and finds accesses that are not ordered before a new access.

A stamp is an integer that identifies an access by its actor, clock and instruction.  An actor is a warp or a stream of
asynchronous operations.  Each granule (a small aligned group of bytes) has the stamps of its last write, and of each
actor's last read.

Each block of 1 KiB has the stamp of each actor's last read in the block.  If a write comes after this read, it also
comes after the actor's earlier reads.  Then the block's granules need no check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.vector_clocks import (
    ACTOR_BITS,
    ACTOR_MASK,
    ASYNC,
    GENERIC,
    AsyncOperation,
    Stamps,
    VectorClocks,
)

BLOCK_SHIFT = 10
"""The binary logarithm of the bytes of a block of memory."""
GRANULE_SIZES = (1, 2, 4, 8, 16)
"""Possible sizes of a granule in bytes; no lane accesses more bytes at once than the largest size."""

Ints = npt.NDArray[np.int64]
Value = npt.NDArray[np.generic] | np.generic
"""A value per lane (n,), or one value for all lanes; of any type of up to 8 bytes, or complex128 for 16 bytes."""
Values = Value | Sequence[Value]
"""The values of a store: one whole value per lane, or a register for each element of the store's vector."""
Bools = npt.NDArray[np.bool_]


@lru_cache(maxsize=256)
def counted(count: int, dtype: type[np.integer] = np.int64) -> npt.NDArray[Any]:
    """Returns the numbers from 0 to `count - 1`.  Callers share the array, and must not change it."""
    return np.arange(count, dtype=dtype)


class Cells(NamedTuple):
    """Holds the memory locations of n accesses, in small and large units.  The small unit is a granule: an aligned
    group of bytes.  All granules have one size, 1 to 16 bytes, and each access covers k of them.  The large unit is a
    block of 1 KiB.  Each access lies in one block."""

    granules: Ints
    """The granules of each access: (n, k)."""
    blocks: Ints
    """The memory block (1 KiB) in which each access lies: (n,)."""


class Late(NamedTuple):
    """Holds m stamps of earlier accesses that race with n new accesses: no order puts them before the new accesses."""

    access: Ints
    """For each stamp, the index of the access with which it has no order: (m,), below n."""
    granules: Ints
    """For each stamp, the granule on which it lies: (m,)."""
    stamps: Stamps
    """The stamps that are not ordered before these accesses: (m,)."""


class LastOf:
    """Stores, for each of `actors` actors and each of `granules` granules, the stamp of the actor's last access."""

    def __init__(self, actors: int, granules: int, shift: int) -> None:
        self._actors, self._granules = actors, granules
        self._stamps: Stamps = np.zeros(actors * granules, np.int64)
        blocks = (granules >> (BLOCK_SHIFT - shift)) + 1
        self._blocks: Stamps = np.zeros((blocks, actors), np.int64)
        self._flat_blocks = self._blocks.reshape(-1)

    def record(self, actors: Ints, cells: Cells, stamps: Stamps) -> None:
        """Stores n accesses in the table of last accesses.  `stamps` `[n]` are integers that identify the accesses.
        `actors` `[n]` are the warps or asynchronous streams that made them.  `cells` is the memory that they cover."""
        flat_index = cells.granules + (actors * self._granules)[:, None]
        self._stamps[flat_index] = stamps[:, None]
        self._flat_blocks[cells.blocks * self._actors + actors] = stamps

    def record_one(self, actor: int, cells: Cells, stamp: int) -> None:
        """Stores that `actor`, a warp or an asynchronous stream, made the last access to all memory in `cells`.
        `stamp` is an integer that identifies this access."""
        self._stamps[actor * self._granules : (actor + 1) * self._granules][cells.granules] = stamp
        self._blocks[cells.blocks, actor] = stamp

    def late(self, cells: Cells, known: Stamps) -> Late | None:
        """Returns the stored accesses that are not ordered before n new accesses, or None if there are none.  `cells`
        is the memory of the new accesses.

        An actor is a warp or an asynchronous stream.  A stamp is a number that grows with each access of an actor.
        `known` has one limit per actor: `[n, actors]`, or `[1, actors]` for all n.  Accesses with stamps below the
        limit are ordered before the new access."""
        blocks = self._blocks.take(cells.blocks, axis=0) >= known
        if not blocks.any():
            return None
        access_index, actor_index = np.nonzero(blocks)
        granules = cells.granules[access_index]
        stamps = self._stamps[granules + (actor_index * self._granules)[:, None]]
        known_limits = np.broadcast_to(known, blocks.shape)[access_index, actor_index]
        row, stamp_column = np.nonzero(stamps >= known_limits[:, None])
        return Late(access_index[row], granules[row, stamp_column], stamps[row, stamp_column]) if row.size else None


class Shadow:
    """Stores the last reads, writes and atomics on `size` bytes of shared memory.  It stores them for each granule, a
    group of `2 ** shift` bytes."""

    def __init__(self, size: int, shift: int, readers: int, warps: int) -> None:
        self.shift = shift
        self._warps = warps
        self._count = size >> shift
        self.writes: Stamps = np.zeros(self._count, np.int64)
        self.reads = LastOf(readers, self._count, shift)
        self.atomics: LastOf | None = None
        self.winners: npt.NDArray[np.int32] = np.zeros(self._count, np.int32)
        """Scratch space: for each granule, the last access of one instruction that wrote it."""

    def cells(self, addresses: npt.NDArray[np.integer], width: int) -> Cells:
        """Returns the memory of n accesses in two units: granules (small aligned groups of bytes) and blocks of 1 KiB.
        Each access covers `width` bytes.  `addresses` `[n]` are their first bytes."""
        flat_addresses = addresses.astype(np.int64, copy=False)
        granules = (flat_addresses >> self.shift)[:, None] + counted(width >> self.shift)
        return Cells(granules, flat_addresses >> BLOCK_SHIFT)

    def all_atomics(self) -> LastOf:
        """Returns the table of the last atomic access of each warp to each granule (a small group of bytes).  The first
        call creates the table, because most kernels have no atomics."""
        if self.atomics is None:
            self.atomics = LastOf(self._warps, self._count, self.shift)
        return self.atomics


class Accesses(ABC):
    """Describes n accesses that one instruction makes to the memory of `shadow`."""

    shadow: Shadow
    cells: Cells
    order: int
    """The plane of the order that these accesses need after earlier ones."""

    @abstractmethod
    def known_of(self, plane: int, actors: Ints) -> Stamps:
        """Returns, for each granule of each access, the least stamp of an actor that is not ordered before the access:
        `[n, k]`.  `actors` `[n, k]` are these actors, and `plane` is the kind of order."""

    def late_writes(self, *planes: int) -> Late | None:
        """Returns the last writes that race with these accesses, or None if there are none.  A write races if no order
        puts it before the access: not `order`, or none of `planes` if they are given."""
        stamps = self.shadow.writes.take(self.cells.granules)
        actors = stamps & ACTOR_MASK
        is_late: Bools = stamps >= self.known_of(planes[0] if planes else self.order, actors)
        for plane in planes[1:]:
            is_late &= stamps >= self.known_of(plane, actors)
        return Late(np.nonzero(is_late)[0], self.cells.granules[is_late], stamps[is_late]) if is_late.any() else None


class Lanes(Accesses):
    """Describes accesses that lanes make through the generic proxy.  If `copies` is true, they are cp.async copies."""

    order = GENERIC

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
        self._clocks, self.shadow = clocks, shadow
        if not addresses.ndim:
            addresses = np.broadcast_to(addresses, warps.shape)
        self.cells = shadow.cells(addresses, width)
        self._rows = slots * clocks.warps + warps
        self.actors: Ints = clocks.copies + warps if copies else warps
        self.stamps: Stamps = clocks.current.take(slots * clocks.actors + self.actors) + (instruction << ACTOR_BITS)

    def known_of(self, plane: int, actors: Ints) -> Stamps:
        rows = (self._rows * self._clocks.actors)[:, None]
        known_stamps: Stamps = self._clocks.known[plane].reshape(-1).take(actors + rows)
        return known_stamps

    def late(self, table: LastOf | None, actors: int) -> Late | None:
        """Returns the accesses in `table` that are not ordered before the lanes' new accesses.  Returns None if there
        are none, or if `table` is None."""
        if table is None:
            return None
        known_stamps = self._clocks.known[GENERIC, :, :, :actors].reshape(-1, actors)
        return table.late(self.cells, known_stamps.take(self._rows, axis=0))

    def actors_of(self, late: Late) -> Ints:
        """Returns which warp or copy stream made the new access in each of m races: `[m]`.  `late` holds the races,
        each between an earlier access and a new access of these lanes."""
        return self.actors[late.access]

    def but_for_proxy(self, late: Late) -> Bools:
        """Tells for each of m races whether only a proxy fence is missing: always False, bool `[m]`.  These lanes use
        the generic proxy, which needs no proxy fence."""
        return np.zeros(late.access.size, np.bool_)

    def last_of_warp(self) -> Ints:
        """Returns, for each access, the last access by the same warp to the same address: (n,)."""
        return last_of(self.cells.granules[:, 0] << ACTOR_BITS | self.actors)


class Operation(Accesses):
    """Describes the memory accesses that one asynchronous operation makes through the async proxy."""

    order = ASYNC

    def __init__(self, shadow: Shadow, transfer: AsyncOperation, addresses: Ints, width: int, instruction: int) -> None:
        self.shadow, self._transfer = shadow, transfer
        self.cells = shadow.cells(addresses, width)
        self.stamp = transfer.stamp + (instruction << ACTOR_BITS)

    def known_of(self, plane: int, actors: Ints) -> Stamps:
        known_stamps: Stamps = self._transfer.known[plane].take(actors)
        return known_stamps

    def late(self, table: LastOf | None, actors: int, plane: int = ASYNC) -> Late | None:
        """Returns the accesses in `table` that race with this asynchronous operation.  An access races if nothing
        orders it before the operation.  Returns None if there are none, or if `table` is None."""
        if table is None:
            return None
        return table.late(self.cells, self._transfer.known[plane, None, :actors])

    def actors_of(self, late: Late) -> Ints:
        """Returns the number of the operation's asynchronous stream, repeated for each of m races: `[m]`."""
        return np.full(late.access.size, self._transfer.actor)

    def but_for_proxy(self, late: Late) -> Bools:
        """Tells for each of m races whether only a proxy fence is missing: bool `[m]`.  If so, the earlier access
        happens before the operation, but no fence orders it for the async proxy."""
        known_stamps = self._transfer.known[GENERIC].take(late.stamps & ACTOR_MASK)
        is_ordered: Bools = late.stamps < known_stamps
        return is_ordered


def replaced(scratch: npt.NDArray[np.int32], granules: Ints) -> tuple[Ints, Ints] | None:
    """Returns the lanes of one instruction whose value another lane overwrites, and for each the lane that writes last.
    Returns None if there are none.  `granules` `[n]` is what the lanes write, and `scratch` has an item per granule."""
    lanes = counted(granules.size, np.int32)
    scratch[granules] = lanes
    winners = scratch.take(granules)
    losers = np.flatnonzero(winners != lanes)
    return (losers, winners[losers].astype(np.int64)) if losers.size else None


def last_of(keys: Ints) -> Ints:
    """Returns, for each element of `keys` `[n]`, the index of the last equal element: `[n]`.  For example, `[5, 7, 5]`
    gives `[2, 1, 2]`."""
    sort_order = keys.argsort(kind="stable")
    last_index: Ints = sort_order[keys[sort_order].searchsorted(keys, side="right") - 1]
    return last_index


def equal(values: Values, others: Values, accesses: int) -> Bools:
    """Returns, per access, whether all registers of `values` and `others` have the same bits: (accesses,)."""
    is_equal = np.ones(accesses, np.bool_)
    for value, other_value in zip(_registers(values), _registers(others), strict=True):
        is_equal &= (_words(value) == _words(other_value)).all(axis=1)
    return is_equal


def collisions(
    values: Values | None, losers: Ints, winners: Ints, is_cross_warp: Bools
) -> Iterator[tuple[str, bool, int, int]]:
    """Yields the kinds of races between the lanes `losers` `[n]` of a store and the lanes `winners` `[n]`, which write
    the same addresses later.  Two warps always race, and lanes of one warp if their values differ.  Yields the kind of
    `Race`, whether the values are equal, the index of the first such pair, and the number of pairs."""
    is_same = is_close = np.zeros(losers.size, np.bool_)
    if values is not None:
        lost, kept = chosen(values, losers), chosen(values, winners)
        is_same, is_close = equal(lost, kept, losers.size), nearly_equal(lost, kept, losers.size)
    for kind, same, is_race in (
        ("write-write", True, is_cross_warp & is_same),
        ("write-write", False, is_cross_warp & ~is_same),
        ("lanes", False, ~is_cross_warp & ~is_same & ~is_close & (values is not None)),
        ("rounding", False, ~is_cross_warp & ~is_same & is_close),
    ):
        if is_race.any():
            yield kind, same, int(is_race.argmax()), int(is_race.sum())


MAX_FP32_ROUNDING = 2.0**-18
"""Two fp32 sums of the same tens of terms may differ by this share of the largest sum that the instruction writes, if
their terms were rounded in another order, or not at all (a fused multiply-add)."""
MAX_FP16_ROUNDING = 2.0**-8
"""The same limit for fp16, which allows four roundings.  The limit for bf16 is eight times as large."""


def nearly_equal(values: Values, others: Values, accesses: int) -> Bools:
    """Compares two sets of stored registers, `values` and `others`.  Returns a bool for each access: `[accesses]`.  It
    is True if all the registers of the access differ at most by rounding, as fp32, bf16 or fp16 numbers."""
    is_access_near = np.ones(accesses, np.bool_)
    for value, other_value in zip(_registers(values), _registers(others), strict=True):
        is_near_value = np.zeros(accesses, np.bool_)
        for float_pair in _as_floats(_columns(value), _columns(other_value)):
            is_near_value |= _near(*float_pair)
        is_access_near &= is_near_value
    return is_access_near


def _as_floats(value: npt.NDArray[Any], other: npt.NDArray[Any]) -> Iterator[tuple[Any, Any, float]]:
    """Yields two values as floats, with the largest difference that rounding can cause. Interprets 16-bit values both
    as fp16 and as bf16. Skips a format in which all numbers are tiny, because the bits are probably integers."""
    if value.itemsize % 4 == 0:
        yield value.view(np.float32), other.view(np.float32), MAX_FP32_ROUNDING
    elif value.itemsize == 2:
        fp16_pair = value.view(np.float16), other.view(np.float16), MAX_FP16_ROUNDING
        bf16, other_bf16 = ((bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for bits in (value, other))
        for left, right, max_rounding in (fp16_pair, (bf16, other_bf16, 8 * MAX_FP16_ROUNDING)):
            if np.abs(np.where(np.isfinite(left), left, 0)).max(initial=0.0) >= np.finfo(np.float16).smallest_normal:
                yield left, right, max_rounding


def _near(a: npt.NDArray[Any], b: npt.NDArray[Any], rounding: float) -> Bools:
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
        # Not each value's own size: a sum that cancels keeps the rounding of its terms.
        largest_magnitude = np.abs(np.where(np.isfinite(a), a, 0)).max(initial=0.0)
        is_lane_near: Bools = (np.isfinite(a) & (np.abs(a - b) <= rounding * largest_magnitude)).all(1)
    return is_lane_near


def chosen(values: Values, lanes: Ints) -> Values:
    """Selects the given lanes from every register."""
    return [value[lanes] if isinstance(value, np.ndarray) else value for value in _registers(values)]


def _registers(values: Values) -> Sequence[Value]:
    return [values] if isinstance(values, np.ndarray | np.generic) else values


def _words(value: Value) -> npt.NDArray[np.unsignedinteger]:
    """Returns the bits of a value as unsigned words: `[lanes, words]`, or `[1, words]` for a scalar."""
    value_column = _columns(value)
    words: npt.NDArray[np.unsignedinteger] = value_column.view(f"u{min(value_column.itemsize, 8)}")
    return words


def _columns(value: Value) -> npt.NDArray[Any]:
    return np.ascontiguousarray(value).reshape(-1, 1)
