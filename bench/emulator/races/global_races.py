"""Finds races on global memory between the CTAs of a grid, in whatever order the emulator runs the CTAs.

Two accesses of different CTAs to one granule (a small aligned group of bytes) race if nothing orders them (`CtaOrder`).
At least one must be a write, and at least one must not be an atomic.

Accesses to flags do not race.  A store that sets a flag (.relaxed, .release, .volatile) is reported with the method
`atomic`.  A load that polls a flag is reported with the method `poll`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.cta_order import CtaOrder
from rooflab.bench.emulator.races.granules import Granules
from rooflab.bench.emulator.races.lane_stores import StoreMarks
from rooflab.bench.emulator.races.reports import Findings, Race
from rooflab.bench.emulator.races.shadow_memory import Values, chosen, collisions, equal, last_of

MOST_LOGGED = 1 << 22
"""The most lanes of reads that wait for a write to their allocation.  Most allocations are never written."""
Ints = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


class EpochSets:
    """Stores each distinct set of epochs (periods of a CTA's work) once, under a number.  Number 0 is the empty set."""

    def __init__(self) -> None:
        self.members: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._joined: dict[tuple[int, int], int] = {}
        self._single: Int32Array = np.zeros(1024, np.int32)

    def of_epochs(self, epochs: Int32Array) -> Int32Array:
        """Returns the ids of n sets with one epoch each: `[n]`.  The set i contains only `epochs[i]`.  An epoch is a
        period of a CTA's work."""
        if int(epochs.max()) >= self._single.size:
            self._single = np.concatenate([self._single, np.zeros(int(epochs.max()) + 1, np.int32)])
        set_numbers = self._single.take(epochs)
        if not set_numbers.all():
            for epoch in np.unique(epochs[set_numbers == 0]):
                self._single[epoch] = self._number(1 << int(epoch))
            set_numbers = self._single.take(epochs)
        return set_numbers

    def joined(self, number: int, epoch: int) -> int:
        """Returns the id of a union: the set with the id `number`, plus `epoch`.  An epoch is a period of a CTA's
        work."""
        union_id = self._joined.get((number, epoch))
        if union_id is None:
            union_id = self._joined[(number, epoch)] = self._number(self.members[number] | 1 << epoch)
        return union_id

    def _number(self, members: int) -> int:
        epoch_set_id = self._numbers.setdefault(members, len(self.members))
        if epoch_set_id == len(self.members):
            self.members.append(members)
        return epoch_set_id


class Touched:
    """Stores who made one kind of access, such as reads, to each granule.  A granule is a small aligned group of bytes.

    For each granule, it stores the last instruction, and a set of epochs.  An epoch is a period of a CTA's work,
    between two synchronisations.  A write to the granule removes the old epochs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.untouched = True

    def join(self, cells: Ints, epochs: Int32Array, instruction: int, sets: EpochSets) -> None:
        """Records which epochs (periods of a CTA's work) access which granules (small groups of bytes).  Lane i is in
        the epoch `epochs[i]`, and accesses the granules `cells[i]`.  `epochs` is `[n]`, and `cells` is `[n, k]`.
        Earlier epochs stay recorded."""
        own_set_ids = sets.of_epochs(epochs)[:, None]
        self._touch()
        stored_ids = self.sets.take(cells)
        self.instructions[cells] = instruction
        if ((stored_ids == 0) | (stored_ids == own_set_ids)).all():
            self.sets[cells] = own_set_ids
            if (own_set_ids == own_set_ids[0]).all() or (self.sets.take(cells) == own_set_ids).all():
                return
        # Other epochs have touched these granules too, before or in this instruction.
        for epoch in np.unique(epochs):
            epoch_cells = cells[epochs == epoch]
            stored_ids = self.sets.take(epoch_cells)
            if stored_ids.min() == stored_ids.max():
                self.sets[epoch_cells] = sets.joined(int(stored_ids.flat[0]), int(epoch))
            else:
                set_numbers, inverse_index = np.unique(stored_ids, return_inverse=True)
                union_ids = np.array([sets.joined(int(set_id), int(epoch)) for set_id in set_numbers], np.int32)
                self.sets[epoch_cells] = union_ids[inverse_index].reshape(epoch_cells.shape)

    def replace(self, cells: Ints, numbers: Int32Array, instruction: int) -> None:
        """Replaces the recorded epochs (periods of a CTA's work) of granules (small groups of bytes).  The granules
        `cells[i]` get the set of epochs with the id `numbers[i]`.  `cells` is `[n, k]`, and `numbers` is `[n]`."""
        self._touch()
        self.sets[cells] = numbers[:, None]
        self.instructions[cells] = instruction

    def clear(self, cells: Ints) -> None:
        """Empties the sets of the granules `cells`."""
        if not self.untouched:
            self.sets[cells] = 0

    def _touch(self) -> None:
        """Allocates the tables at the first access, because most grids use only two of the five kinds of access."""
        if self.untouched:
            self.untouched = False
            self.sets: Int32Array = np.zeros(self._count, np.int32)
            self.instructions: Int32Array = np.zeros(self._count, np.int32)


class GlobalRaces(CtaOrder):
    """Detects races on global memory between the `ctas` CTAs of a grid, by shadow memory.

    Shadow memory has one entry for each granule of global memory.  With `warps` above 1, the `warps` warps of a CTA are
    tracked separately.  At most `limit` different races are stored.  `by_tma` has the instructions after whose writes
    TMA needs no fence.proxy.async, and whether each is TMA itself; those that write tensor maps have another fence.
    Raises `ValueError` on `ctas` or `warps` below 1.
    """

    def __init__(
        self, ctas: int, granules: Granules, limit: int = 100, warps: int = 1, by_tma: Mapping[int, bool] = {}
    ) -> None:
        self.granules, self._by_tma = granules, by_tma
        self.findings = Findings(limit)
        super().__init__(ctas, warps)
        self._writes, self._readers, self._atomics, self._polls, self._near = (
            Touched(granules.count) for _ in range(5)
        )
        self._sets = EpochSets()
        self._written: set[int] = set()
        """The bases of the allocations that the grid has written."""
        self._log: dict[int, list[tuple[Ints, int, int, Int32Array]]] = {}
        """By base: reads of an allocation that nothing has written yet, with addresses, width, instruction, epochs."""
        self._logged = 0

    @property
    def found(self) -> list[Race]:
        """Returns the races that the detector found so far."""
        return self.findings.races

    def writes(self, base: int) -> None:
        """Records that the allocation at `base` is written or used by atomics from now on."""
        self._written.add(base)
        for addresses, width, instruction, epochs in self._log.pop(base, ()):
            self._readers.join(self.granules.of(addresses, width), epochs, instruction, self._sets)

    def read(self, actors: Ints, addresses: Ints, width: int, instruction: int, base: int | None = None) -> None:
        """Records that n lanes read `width` bytes each, at `addresses` `[n]`.  `actors` `[n]` are the indices of the
        lanes' CTAs, or of their warps if warps are tracked separately.

        `base` is the base of their allocation.  The reads are only noted until `writes` is called for it.

        `width` is a multiple of the granule size, the bytes that the detector tracks together.  All addresses must lie
        in registered allocations.
        """
        epochs = self.epochs(actors)
        if base is not None and base not in self._written:
            self._log.setdefault(base, []).append((addresses, width, instruction, epochs))
            self._logged += addresses.size
            if self._logged > MOST_LOGGED:
                self._logged = 0
                for logged_base in list(self._log):
                    self.writes(logged_base)
            return
        cells = self.granules.of(addresses, width)
        self._meet("write-read", self._writes, actors, epochs, cells, instruction)
        self._meet("write-read", self._atomics, actors, epochs, cells, instruction)
        if self._by_tma.get(instruction):
            self._meet("write-read", self._writes, actors, epochs, cells, instruction, proxy=True)
        self._readers.join(cells, epochs, instruction, self._sets)

    def write(
        self,
        actors: Ints,
        addresses: Ints,
        width: int,
        instruction: int,
        values: Values | None = None,
        old: Callable[[], Values] | None = None,
    ) -> StoreMarks:
        """Records that n lanes write `width` bytes each, at `addresses` `[n]`.  `actors` `[n]` gives each lane's warp
        or CTA.  Returns the stores' marks for `LaneStores`.

        `values` are the stored registers.  `old()` returns the memory's earlier values, and is called only at a race.
        If both are given, a race's field `same_value` tells whether the write left the memory unchanged."""
        epochs, cells = self.epochs(actors), self.granules.of(addresses, width)
        for race_kind, touched_cells in (
            ("write-write", self._writes),
            ("read-write", self._readers),
            ("read-write", self._polls),
        ):
            self._meet(race_kind, touched_cells, actors, epochs, cells, instruction, values, old)
        # An atomic that comes after the write changes the value once more, whatever it left before the write.
        self._meet("write-write", self._atomics, actors, epochs, cells, instruction)
        # An access that is ordered after this write is also ordered after all that came before it.
        for older in (self._readers, self._atomics, self._polls, self._near):
            older.clear(cells)
        numbers = self._sets.of_epochs(epochs)
        self._writes.replace(cells, numbers, instruction)
        self._collide(actors, epochs, cells, instruction, values)
        return StoreMarks(self._writes.sets, cells, numbers, lambda: self._sets.of_epochs(self.epochs(actors)))

    def atomic(self, actors: Ints, addresses: Ints, width: int, instruction: int, near: bool = False) -> None:
        """Records an atomic operation of n lanes on `width` bytes each, at `addresses` `[n]`.  `actors` `[n]` gives
        each lane's warp or CTA.  If the atomic orders other accesses, callers also call `synchronise`.

        `near` means .cluster scope.  Such an operation races with atomics of other clusters."""
        epochs, cells = self.epochs(actors), self.granules.of(addresses, width)
        self._meet("write-write", self._writes, actors, epochs, cells, instruction)
        self._meet("read-write", self._readers, actors, epochs, cells, instruction)
        self._meet("write-write", self._near, actors, epochs, cells, instruction, beyond=True)
        if near:
            self._meet("write-write", self._atomics, actors, epochs, cells, instruction, beyond=True)
            self._meet("read-write", self._polls, actors, epochs, cells, instruction, beyond=True)
            self._near.join(cells, epochs, instruction, self._sets)
        self._atomics.join(cells, epochs, instruction, self._sets)

    def poll(self, actors: Ints, addresses: Ints, width: int, instruction: int, near: bool = False) -> None:
        """Records that lanes poll a flag.  These reads do not race with atomics.  Takes the arguments of `atomic`."""
        epochs, cells = self.epochs(actors), self.granules.of(addresses, width)
        self._meet("write-read", self._writes, actors, epochs, cells, instruction)
        other_atomic_cells = self._atomics if near else self._near
        self._meet("write-read", other_atomic_cells, actors, epochs, cells, instruction, beyond=True)
        self._polls.join(cells, epochs, instruction, self._sets)

    def _meet(
        self,
        kind: str,
        touched: Touched,
        actors: Ints,
        epochs: Int32Array,
        cells: Ints,
        instruction: int,
        values: Values | None = None,
        old: Callable[[], Values] | None = None,
        beyond: bool = False,
        proxy: bool = False,
    ) -> None:
        """Compares new accesses with the earlier accesses in `touched`, and reports their races.  Two accesses of
        different CTAs race if they touch the same memory and nothing orders them.

        With `beyond`, reports only races between CTAs of different clusters.  With `proxy`, reports ordered accesses
        between which only a proxy fence is missing, also of one CTA; the earlier ones are those of threads."""
        if touched.untouched:
            return
        set_numbers = touched.sets.take(cells)
        is_foreign = (set_numbers != 0) & (proxy | (set_numbers != self._sets.of_epochs(epochs)[:, None]))
        if not is_foreign.any():
            return
        lanes, granule_columns = np.nonzero(is_foreign)
        pairs, inverse_index = np.unique(actors[lanes] << 32 | set_numbers[is_foreign], return_inverse=True)
        unknown_epochs = [
            self.unknown(int(pair) >> 32, self._sets.members[int(pair) & 0xFFFFFFFF], beyond, proxy) for pair in pairs
        ]
        if not any(unknown_epochs):
            return
        is_equal = np.zeros(actors.size, np.bool_)
        if values is not None and old is not None:
            is_equal = equal(chosen(values, last_of(cells[:, 0] << 32 | actors)), old(), actors.size)
        race_keys = (
            touched.instructions[cells[is_foreign]].astype(np.int64) << 32 | inverse_index << 1 | is_equal[lanes]
        )
        for first_index, count in zip(*np.unique(race_keys, return_index=True, return_counts=True)[1:], strict=True):
            remaining_epochs = unknown_epochs[int(inverse_index[first_index])]
            if remaining_epochs and not (proxy and race_keys[first_index] >> 32 in self._by_tma):
                lane, cell = int(lanes[first_index]), int(cells[lanes[first_index], granule_columns[first_index]])
                owner = self.owners[(remaining_epochs & -remaining_epochs).bit_length() - 1]
                earlier_instruction = int(touched.instructions[cell])
                cta = int(actors[lane]) // self.warps
                more = proxy, bool(is_equal[lane]), int(count)
                self._add(kind, earlier_instruction, instruction, owner, cta, cell, *more)

    def _collide(self, actors: Ints, epochs: Int32Array, cells: Ints, instruction: int, values: Values | None) -> None:
        """Reports races between CTAs that write the same granule (memory unit) in the same instruction."""
        own_set_ids = self._sets.of_epochs(epochs)
        first_cells = cells[:, 0]
        is_overwritten = self._writes.sets.take(first_cells) != own_set_ids
        if not is_overwritten.any():
            return
        overwritten_lanes = np.flatnonzero(is_overwritten)
        # A granule keeps the write of its last lane.
        last_lanes = last_of(first_cells)[overwritten_lanes]
        ctas = actors // self.warps
        is_in_two_ctas = ctas[overwritten_lanes] != ctas[last_lanes]
        overwritten_lanes, last_lanes = overwritten_lanes[is_in_two_ctas], last_lanes[is_in_two_ctas]
        kept_lanes = last_of(first_cells << 32 | ctas)[overwritten_lanes]
        are_two_warps = np.ones(kept_lanes.size, np.bool_)
        for kind, is_kept, index, count in collisions(values, kept_lanes, last_lanes, are_two_warps):
            pair = int(ctas[kept_lanes[index]]), int(ctas[last_lanes[index]])
            self._add(kind, instruction, instruction, *pair, int(first_cells[kept_lanes[index]]), False, is_kept, count)

    def _add(self, kind: str, first: int, second: int, owner: int, cta: int, cell: int, *more: Any) -> None:
        """Reports a race of two instructions at a granule.  `more` are the last fields of a `Race`."""
        cta_names, address = (f"CTA {owner}", f"CTA {cta}"), self.granules.address(cell)
        self.findings.add(Race("global", kind, first, second, *cta_names, address, -1, *more))
