"""Finds races on global memory between the warps of one CTA, in whatever order the emulator runs them.

Two accesses of different warps to one granule (a small aligned group of bytes) race if no barrier, mbarrier or flag
orders them (`VectorClocks`).  At least one must be a write, and at least one must not be an atomic.

Each granule has the stamps of its last write, of its last atomic, and of the last reads of two warps.  So a write that
is ordered after these two reads, but not after a third warp's earlier read, is not seen.

A copy into shared memory is compared with earlier writes, but a later write is not compared with it.

Where a tensor has fewer elements than a CTA has threads, Triton lets several warps load the same elements, and only one
of them store.  So such a race is no fault if another warp reads the granule in the same instruction, and the racing
reader never runs a store that depends on what it read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.global_races import MOST_LOGGED
from rooflab.bench.emulator.races.granules import Granules
from rooflab.bench.emulator.races.lane_stores import StoreMarks
from rooflab.bench.emulator.races.reports import Findings, Race
from rooflab.bench.emulator.races.shadow_memory import Bools, Ints, Values, chosen, collisions, equal, last_of, replaced
from rooflab.bench.emulator.races.vector_clocks import ACTOR_BITS, ACTOR_MASK, GENERIC, LOWER_MASK, Stamps, VectorClocks


class WarpLanes:
    """Describes the lanes of one instruction: their CTAs and warps, and the time on the warps' clocks.

    Everything else is computed when it is asked for, because most reads are of memory that nobody writes."""

    def __init__(self, c: Any, active: Ints | None, instruction: int) -> None:
        self.clocks: VectorClocks = c.group.races
        self.instruction = instruction
        self._slots, self._warps, self._ctas = c.slots, c.warps, c.group.ctas
        self._active, self._race_warps = active, c.group.race_warps
        self._now = self.clocks.now()

    @cached_property
    def ctas(self) -> Ints:
        """Returns the number of each lane's CTA in the grid: `[n]`."""
        ctas: Ints = np.asarray(self._ctas)[self._slots if self._active is None else self._slots[self._active]]
        return ctas

    @cached_property
    def warps(self) -> Ints:
        """Returns the warp of each lane in its CTA or cluster: `[n]`."""
        warps: Ints = self.rows % self._race_warps
        return warps

    @cached_property
    def rows(self) -> Ints:
        """Returns for each lane the number of its warp among the warps of all CTAs that run together: `[n]`."""
        warps: Ints = self._warps if self._active is None else self._warps[self._active]
        return warps

    @cached_property
    def stamps(self) -> Stamps:
        """Returns the stamp of each lane's access: `[n]`."""
        stamps: Stamps = self._now.take(self.rows) + (self.instruction << ACTOR_BITS)
        return stamps

    def unordered(self, stamps: Stamps) -> Bools:
        """Returns whether each access in `stamps` `[n, k]` is not ordered before the access of its lane."""
        clocks = self.clocks
        late: Bools = stamps >= clocks.known[GENERIC].reshape(-1).take(
            (stamps & ACTOR_MASK) + (self.rows * clocks.actors)[:, None]
        )
        return late


class _Last:
    """Stores the stamp of the last access of one kind to each granule, and the CTA that made it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.untouched = True

    def record(self, cells: Ints, stamps: Stamps, ctas: Ints) -> None:
        """Stores accesses with `stamps` `[n]` of CTAs `ctas` `[n]` to the granules `cells` `[n, k]`."""
        if self.untouched:
            self.untouched = False
            self.stamps: Stamps = np.zeros(self._count, np.int64)
            self.owners: npt.NDArray[np.int32] = np.zeros(self._count, np.int32)
        self.stamps[cells] = stamps[:, None]
        self.owners[cells] = ctas[:, None] + 1

    def of_cta(self, cells: Ints, ctas: Ints) -> Bools | None:
        """Returns for which granules `cells` `[n, k]` the last access was one of the lane's own CTA, or None."""
        if self.untouched:
            return None
        owners = self.owners.take(cells)
        if not owners.any():
            return None
        is_own: Bools = owners == (ctas + 1)[:, None]
        return is_own if is_own.any() else None


class WarpRaces:
    """Detects races between the warps of a CTA on the granules of global memory.  A grid has `ctas` CTAs of `warps`
    warps.  `stores_of` returns the stores that the result of an instruction may decide.  Stores at most `limit` races.
    """

    def __init__(
        self, granules: Granules, ctas: int, warps: int, stores_of: Callable[[int], Iterable[int]], limit: int = 100
    ) -> None:
        self.findings = Findings(limit)
        self._granules = granules
        self._writes, self._atomics, self._reads, self._older_reads = (_Last(granules.count) for _ in range(4))
        self._warps_per_cta = warps
        self._stores_of = stores_of
        self._wrote: dict[int, Bools] = defaultdict(lambda: np.zeros(ctas * warps, np.bool_))
        """By store and warp of the grid, whether the warp ran it."""
        self._of_copies: list[tuple[int, Race]] = []
        """The races of warps that read what others read in the same instruction, each with its reader."""
        self._winners: npt.NDArray[np.int32] | None = None
        """Scratch space: for each granule, the last lane of one instruction that wrote it."""
        self._written: set[int] = set()
        """The bases of the allocations that the launch has written."""
        self._log: dict[int, list[tuple[WarpLanes, Ints, int]]] = {}
        self._logged = 0
        self._released: dict[int, dict[int, Stamps]] = {}
        """By CTA and warp: what the warp knew when it last set a flag."""
        self._acquired: dict[int, Stamps] = {}
        """By CTA: what its warps know since one of them read a flag."""

    @property
    def found(self) -> list[Race]:
        """Returns the races that the detector found so far."""
        for reader, race in self._of_copies:
            read = race.first if race.kind == "read-write" else race.second
            if any(self._wrote[store][reader] for store in self._stores_of(read)):
                self.findings.add(race)
        self._of_copies.clear()
        return self.findings.races

    def read(self, lanes: WarpLanes, base: int, addresses: Ints, width: int, copy: bool = False) -> None:
        """Records that `lanes` read `width` bytes each at `addresses` `[n]`, in the allocation at `base`.  `copy` means
        an asynchronous copy."""
        if base in self._written:
            cells = self._granules.of(addresses, width)
            self._meet("write-read", self._writes, lanes, cells)
            self._meet("write-read", self._atomics, lanes, cells)
        if copy:
            return
        self._log.setdefault(base, []).append((lanes, addresses, width))
        self._logged += addresses.size
        if self._logged > MOST_LOGGED:
            for logged_base in list(self._log):
                self._settle(logged_base)

    def write(
        self, lanes: WarpLanes, base: int, addresses: Ints, width: int, values: Values | None, old: Callable[[], Values]
    ) -> StoreMarks:
        """Records that `lanes` write `values` of `width` bytes at `addresses`.  `old()` returns the earlier values.
        Returns the stores' marks for `LaneStores`."""
        self._settle(base)
        cells = self._granules.of(addresses, width)
        for kind, table in (
            ("write-write", self._writes),
            ("read-write", self._reads),
            ("read-write", self._older_reads),
            ("write-write", self._atomics),
        ):
            self._meet(kind, table, lanes, cells, values, old)
        stamps = lanes.stamps
        self._writes.record(cells, stamps, lanes.ctas)
        self._written.add(base)
        self._wrote[lanes.instruction][self._in_grid(lanes)] = True
        self._collide(lanes, cells[:, 0], values)
        return StoreMarks(self._writes.stamps, cells, stamps)

    def atomic(self, lanes: WarpLanes, bases: Iterable[int], addresses: Ints, width: int) -> None:
        """Records an atomic operation, or a store that sets a flag, in the allocations at `bases`."""
        for base in bases:
            self._settle(base)
            self._written.add(base)
        cells = self._granules.of(addresses, width)
        self._meet("write-write", self._writes, lanes, cells)
        self._meet("read-write", self._reads, lanes, cells)
        self._meet("read-write", self._older_reads, lanes, cells)
        self._atomics.record(cells, lanes.stamps, lanes.ctas)
        self._wrote[lanes.instruction][self._in_grid(lanes)] = True

    def poll(self, lanes: WarpLanes, addresses: Ints, width: int) -> None:
        """Records a load that reads a flag."""
        self._meet("write-read", self._writes, lanes, self._granules.of(addresses, width))

    def synchronise(self, lanes: WarpLanes, stores: bool = True, loads: bool = True) -> None:
        """Records that `lanes` set flags (`stores`) or read them (`loads`).

        The whole CTA then knows what the other warps knew when they set flags.  This is more than PTX promises, so that
        no flag causes a false report: fences, and the orders of the two accesses, are left to `CtaOrder`."""
        clocks = lanes.clocks
        for cta, row in np.unique(np.stack([lanes.ctas, lanes.rows]), axis=1).T.tolist():
            slot, warp = divmod(row, clocks.warps)
            released = self._released.setdefault(cta, {})
            if loads and (others := [known for other, known in released.items() if other != warp]):
                self._acquired[cta] = np.maximum.reduce([*others, self._acquired.get(cta, others[0])])
            if stores:
                released[warp] = clocks.known[GENERIC, slot, warp].copy()
                clocks.tick(slot, warp)

    def _in_grid(self, lanes: WarpLanes) -> Ints:
        """Returns for each lane the number of its warp in the grid: `[n]`."""
        numbers: Ints = lanes.ctas * self._warps_per_cta + lanes.warps % self._warps_per_cta
        return numbers

    def _settle(self, base: int) -> None:
        """Moves the logged reads of the allocation at `base` to the tables."""
        for lanes, addresses, width in self._log.pop(base, ()):
            self._logged -= addresses.size
            cells, stamps, ctas = self._granules.of(addresses, width), lanes.stamps, lanes.ctas
            if not self._reads.untouched:
                last_stamps = self._reads.stamps.take(cells)
                is_other = self._reads.owners.take(cells) == (ctas + 1)[:, None]
                is_other &= (last_stamps ^ stamps[:, None]) & ACTOR_MASK != 0
                if is_other.any():
                    rows = np.nonzero(is_other)[0]
                    self._older_reads.record(cells[is_other][:, None], last_stamps[is_other], ctas[rows])
            self._reads.record(cells, stamps, ctas)
            is_lost = self._reads.stamps.take(cells[:, 0]) != stamps
            if is_lost.any():
                self._older_reads.record(cells[is_lost], stamps[is_lost], ctas[is_lost])

    def _meet(
        self,
        kind: str,
        table: _Last,
        lanes: WarpLanes,
        cells: Ints,
        values: Values | None = None,
        old: Callable[[], Values] | None = None,
    ) -> None:
        """Compares new accesses with the earlier ones in `table`, and reports their races."""
        is_late = table.of_cta(cells, lanes.ctas)
        if is_late is None:
            return
        stamps = table.stamps.take(cells)
        is_late &= lanes.unordered(stamps)
        if is_late.any() and self._acquired:
            for cta, known in self._acquired.items():
                of_cta = lanes.ctas == cta
                is_late[of_cta] &= stamps[of_cta] >= known.take(stamps[of_cta] & ACTOR_MASK)
        if not is_late.any():
            return
        rows, columns = np.nonzero(is_late)
        is_same = np.zeros(lanes.warps.size, np.bool_)
        if values is not None and old is not None:
            last_lanes = last_of(cells[:, 0] << ACTOR_BITS | lanes.warps)
            is_same = equal(chosen(values, last_lanes), old(), lanes.warps.size)
        late_stamps = stamps[is_late]
        readers = late_stamps & ACTOR_MASK if kind == "read-write" else lanes.warps[rows]
        is_copy = self._read_together(kind, cells[is_late], late_stamps, lanes, rows)
        # By pair of instructions; and by reader, if several warps read the granule in one instruction.
        keys = (late_stamps & LOWER_MASK) >> ACTOR_BITS << ACTOR_BITS | np.where(is_copy, readers, 0)
        keys = keys << 2 | is_copy << 1 | is_same[rows]
        for first, count in zip(*np.unique(keys, return_index=True, return_counts=True)[1:], strict=True):
            lane, stamp = int(rows[first]), int(late_stamps[first])
            cell = int(cells[lane, columns[first]])
            earlier = (stamp & LOWER_MASK) >> ACTOR_BITS
            race = self._race(kind, earlier, stamp & ACTOR_MASK, lanes, lane, cell, bool(is_same[lane]), int(count))
            if is_copy[first]:
                reader = int(readers[first]) % self._warps_per_cta
                self._of_copies.append((int(lanes.ctas[lane]) * self._warps_per_cta + reader, race))
            else:
                self.findings.add(race)

    def _read_together(self, kind: str, cells: Ints, late_stamps: Stamps, lanes: WarpLanes, rows: Ints) -> Bools:
        """Returns for each of m races whether another warp read the granule in the instruction that reads it: `[m]`."""
        is_copy = np.zeros(cells.size, np.bool_)
        if "read" not in kind:
            return is_copy
        for base in list(self._log):
            self._settle(base)
        read_in = (late_stamps & LOWER_MASK) >> ACTOR_BITS if kind == "read-write" else lanes.instruction
        for table in (self._reads, self._older_reads):
            if not table.untouched:
                stamps = table.stamps.take(cells)
                is_other = table.owners.take(cells) == lanes.ctas[rows] + 1
                if kind == "read-write":
                    is_other &= stamps & ACTOR_MASK != late_stamps & ACTOR_MASK
                is_copy |= is_other & ((stamps & LOWER_MASK) >> ACTOR_BITS == read_in)
        return is_copy

    def _collide(self, lanes: WarpLanes, cells: Ints, values: Values | None) -> None:
        """Reports lanes of one CTA that write one address in the same instruction: two warps always, and the lanes of a
        warp if their values differ."""
        if self._winners is None:
            self._winners = np.zeros(self._granules.count, np.int32)
        if (found := replaced(self._winners, cells)) is None:
            return
        is_own = lanes.ctas[found[0]] == lanes.ctas[found[1]]
        losers, kept_lanes = (each[is_own] for each in found)
        is_cross_warp = lanes.warps[losers] != lanes.warps[kept_lanes]
        for kind, same, index, count in collisions(values, losers, kept_lanes, is_cross_warp):
            loser, winner = int(losers[index]), int(kept_lanes[index])
            first_warp, cell = int(lanes.warps[loser]), int(cells[winner])
            self.findings.add(self._race(kind, lanes.instruction, first_warp, lanes, winner, cell, same, count))

    def _race(
        self, kind: str, first: int, first_warp: int, lanes: WarpLanes, lane: int, cell: int, same: bool, count: int
    ) -> Race:
        cta = f" of CTA {int(lanes.ctas[lane])}"
        first_name, name = (lanes.clocks.name_of(warp) for warp in (first_warp, int(lanes.warps[lane])))
        actors = (first_name, name) if cta in name else (first_name + cta, name + cta)
        address = self._granules.address(cell)
        return Race("global", kind, first, lanes.instruction, *actors, address, -1, same_value=same, count=count)
