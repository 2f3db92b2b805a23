"""Remembers which lanes of a warp made the last stores, until something orders the lanes among each other.

The detectors order accesses by warp.  But a lane that releases (an arrival at an mbarrier, a flag, a bulk copy out of
shared memory) releases its own accesses alone, and those that are ordered before the release (PTX ISA 8.7, "Release and
Acquire Patterns" and "mbarrier.arrive").  So the stores of the warp's other lanes get a later time: the time that
begins with the release.  Then the detectors themselves find the race with the thread that acquires.

What orders the lanes of a warp is bar.warp.sync (PTX ISA 8.7, "bar.warp.sync") and a barrier of the CTA or cluster.
elect.sync orders no memory.  shfl.sync, vote.sync, match.sync and redux.sync do not either (CUDA C++ Programming Guide,
"Warp Shuffle Functions", "Warp Vote Functions").  They still count as an order here, because much code relies on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rooflab.bench.emulator.races.shadow_memory import Bools, Ints
from rooflab.bench.emulator.races.vector_clocks import LOWER_MASK, VectorClocks

MOST_STORES = 512
"""The most store instructions of a group of CTAs that are remembered; the oldest are forgotten first."""


class StoreMarks(NamedTuple):
    """Holds what a detector noted of one store instruction of n lanes."""

    table: Any
    """The detector's table: the mark of the last write of each granule.  A mark is a stamp or a set of epochs."""
    cells: Ints
    """The granules of each lane: `[n, k]`."""
    marks: Any
    """The mark that each lane's granules got: `[n]`."""
    now: Callable[[], Any] | None = None
    """Returns the marks that the same stores would get if they came now: `[n]`.  None for stamps of warps."""


class _Store:
    def __init__(self, lanes: Ints, stored: StoreMarks, instruction: int, number: int) -> None:
        self.lanes, self.stored, self.instruction, self.number = lanes, stored, instruction, number
        self.first, self.last = int(lanes[0]), int(lanes[-1])
        self.marks = stored.marks

    def delay(self, is_left: Bools, is_kept: Bools, clocks: VectorClocks) -> None:
        """Gives the stores of the lanes in `is_left` `[n]` the present time, except where a later write or a lane in
        `is_kept` `[n]` wrote the granule too."""
        table, cells, _, now = self.stored
        if now is None:
            new_marks = (clocks.now().take(self.lanes >> 5) & ~LOWER_MASK) + (self.marks & LOWER_MASK)
        else:
            new_marks = now()
        for is_of, old, new in ((is_left, self.marks, new_marks), (is_kept, new_marks, self.marks)):
            own = cells[is_of]
            is_last = table.take(own) == old[is_of, None]
            table[own[is_last]] = np.broadcast_to(new[is_of, None], own.shape)[is_last]
        self.marks = np.where(is_left, new_marks, self.marks)


class LaneStores:
    """Remembers the stores of the threads whose warps have `clocks`.  `releases` gets, by number of a store, the last
    release that came from another lane of its warp, with nothing that orders the two lanes."""

    def __init__(self, clocks: VectorClocks, releases: dict[int, int]) -> None:
        self._clocks, self._releases = clocks, releases
        self._stores: deque[_Store] = deque(maxlen=MOST_STORES)
        self._count = 0
        self._ordered = np.zeros(32 * clocks.slots * clocks.warps, np.int64)
        """By thread: the number of its last store that is ordered before what the other lanes do next, or more."""

    def add(self, lanes: Ints, stored: StoreMarks, instruction: int) -> None:
        """Notes a store of the threads `lanes` `[n]`, in rising order."""
        self._count += 1
        self._stores.append(_Store(lanes, stored, instruction, self._count))

    def order(self, lanes: Ints) -> None:
        """Records that the threads `lanes`, in rising order, meet, or release what they stored themselves."""
        if not self._stores or not len(lanes):
            return
        self._ordered[lanes] = self._count
        first, last = int(lanes[0]), int(lanes[-1])
        if last - first + 1 == len(lanes):
            kept = [store for store in self._stores if store.first < first or store.last > last]
            self._stores = deque(kept, MOST_STORES)

    def release(self, lanes: Ints, instruction: int) -> None:
        """Records that the threads `lanes`, in rising order, released, and that a new time of their warps has begun."""
        self.order(lanes)
        if not self._stores or not len(lanes):
            return
        first_warp, last_warp = int(lanes[0]) >> 5, int(lanes[-1]) >> 5
        has_released = np.zeros(len(self._ordered) >> 5, np.bool_)
        has_released[lanes >> 5] = True
        for store in self._stores:
            if store.first >> 5 <= last_warp and store.last >> 5 >= first_warp:
                is_concerned = has_released[store.lanes >> 5]
                is_left = is_concerned & (self._ordered[store.lanes] < store.number)
                if is_left.any():
                    store.delay(is_left, is_concerned & ~is_left, self._clocks)
                    self._releases[store.instruction] = instruction
