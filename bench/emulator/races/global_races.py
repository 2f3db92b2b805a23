"""Finds races on global memory between the CTAs of a grid, in any order in which the emulator runs the CTAs.

A granule is a few aligned bytes.  Two CTAs race if both access one granule and nothing orders the accesses
(`CtaOrder`).  At least one access must be a write, and at least one must not be an atomic.  Accesses within one CTA are
not compared.  Callers report a store that sets a flag (.relaxed, .release, .volatile) as an atomic, and a load that
polls a flag as `poll`.  Such stores and loads do not race with each other.

An epoch is the work of a CTA between two of its releases.  The epochs that accessed a granule form a set.  Each
distinct set is stored once and has a number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.cta_order import CtaOrder
from rooflab.bench.emulator.races.reports import Findings, Race
from rooflab.bench.emulator.races.shadow_memory import GRANULES, Bools, Values, chosen, equal, last_of

Ints = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


class EpochSets:
    """Stores sets of epochs (periods of a CTA's work).  Each distinct set is stored once.  Set number 0 is empty."""

    def __init__(self) -> None:
        self.members: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._joined: dict[tuple[int, int], int] = {}
        self._single: Int32Array = np.zeros(1024, np.int32)

    def of_epochs(self, epochs: Int32Array) -> Int32Array:
        """Returns, for each of `epochs` (n,), the number of the set that has only this epoch: (n,)."""
        if int(epochs.max()) >= self._single.size:
            self._single = np.concatenate([self._single, np.zeros(int(epochs.max()) + 1, np.int32)])
        sets = self._single.take(epochs)
        if not sets.all():
            for epoch in np.unique(epochs[sets == 0]):
                self._single[epoch] = self._number(1 << int(epoch))
            sets = self._single.take(epochs)
        return sets

    def joined(self, number: int, epoch: int) -> int:
        """Returns the number of the set that has `epoch` and all epochs of the set `number`."""
        joined = self._joined.get((number, epoch))
        if joined is None:
            joined = self._joined[(number, epoch)] = self._number(self.members[number] | 1 << epoch)
        return joined

    def _number(self, members: int) -> int:
        number = self._numbers.setdefault(members, len(self.members))
        if number == len(self.members):
            self.members.append(members)
        return number


class Touched:
    """Stores for each granule the epochs of one kind of access since the last write, and the last such instruction."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.untouched = True

    def join(self, cells: Ints, epochs: Int32Array, instruction: int, sets: EpochSets) -> None:
        """Adds the epoch of each lane (n,) to the sets of the granules `cells` (n, k) that the lane accesses."""
        mine = sets.of_epochs(epochs)[:, None]
        self._touch()
        old_sets = self.sets.take(cells)
        self.instructions[cells] = instruction
        if ((old_sets == 0) | (old_sets == mine)).all():
            self.sets[cells] = mine
            if (mine == mine[0]).all() or (self.sets.take(cells) == mine).all():
                return
        # Other epochs have touched these granules too, before or in this instruction.
        for epoch in np.unique(epochs):
            epoch_cells = cells[epochs == epoch]
            old_sets = self.sets.take(epoch_cells)
            if old_sets.min() == old_sets.max():
                self.sets[epoch_cells] = sets.joined(int(old_sets.flat[0]), int(epoch))
            else:
                set_numbers, inverse = np.unique(old_sets, return_inverse=True)
                joined = np.array([sets.joined(int(number), int(epoch)) for number in set_numbers], np.int32)
                self.sets[epoch_cells] = joined[inverse].reshape(epoch_cells.shape)

    def replace(self, cells: Ints, numbers: Int32Array, instruction: int) -> None:
        """Replaces the sets of the granules `cells` (n, k) by the set number of each lane (n,)."""
        self._touch()
        self.sets[cells] = numbers[:, None]
        self.instructions[cells] = instruction

    def clear(self, cells: Ints) -> None:
        """Makes the sets of the granules `cells` empty."""
        if not self.untouched:
            self.sets[cells] = 0

    def _touch(self) -> None:
        """Allocates the tables at the first access, because most grids need only two of the five kinds of tables."""
        if self.untouched:
            self.untouched = False
            self.sets: Int32Array = np.zeros(self._count, np.int32)
            self.instructions: Int32Array = np.zeros(self._count, np.int32)


class GlobalRaces(CtaOrder):
    """Keeps shadow memory for the allocations that a grid of `ctas` CTAs uses, in granules of `granule_bytes`.

    `granule_bytes` is a power of two, at most 16.  An actor is a CTA, or one of its `warps`, as in `CtaOrder`.  At most
    `limit` different races are stored.  Raises `ValueError` on another `granule_bytes`, and on `ctas` or `warps` below
    1."""

    def __init__(self, ctas: int, granule_bytes: int = 4, limit: int = 100, warps: int = 1) -> None:
        if granule_bytes not in GRANULES:
            raise ValueError(f"granule_bytes: expected 1, 2, 4, 8 or 16, got {granule_bytes}")
        self.findings = Findings(limit)
        self._shift = granule_bytes.bit_length() - 1
        self._bases, self._ends = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._moves = np.zeros(0, np.int64)
        self._spans: dict[int, Ints] = {}
        super().__init__(ctas, warps)

    @property
    def found(self) -> list[Race]:
        """Returns the races that were found so far."""
        return self.findings.races

    def restart(self) -> None:
        """Begins another grid.  All accesses so far are ordered before the new grid."""
        super().restart()
        count = int(((self._ends - self._bases) >> self._shift).sum())
        self._writes, self._readers, self._atomics, self._polls, self._near = (Touched(count) for _ in range(5))
        self._sets = EpochSets()

    def add(self, base: int, size: int) -> None:
        """Registers `size` bytes at `base`, merges them with overlapping allocations, and calls `restart`.

        Raises `ValueError` on a size below one."""
        if size < 1:
            raise ValueError(f"size: expected at least 1 byte, got {size}")
        start = base >> self._shift << self._shift
        end = -(-(base + size) >> self._shift) << self._shift
        joined = (start < self._ends) & (self._bases < end)
        bases = np.append(self._bases[~joined], min(start, *self._bases[joined], start))
        ends = np.append(self._ends[~joined], max(end, *self._ends[joined], end))
        order = bases.argsort()
        self._bases, self._ends = bases[order], ends[order]
        sizes = self._ends - self._bases
        self._moves = np.cumsum(sizes) - sizes - self._bases
        self.restart()

    def read(self, actors: Ints, addresses: Ints, width: int, instruction: int) -> None:
        """Records that lanes of `actors` (n,) read `width` bytes at `addresses` (n,).

        `width` is a multiple of the granule size.  All addresses must lie in registered allocations.
        """
        epochs, cells = self.epochs(actors), self._cells(addresses, width)
        self._meet("write-read", self._writes, actors, epochs, cells, instruction)
        self._meet("write-read", self._atomics, actors, epochs, cells, instruction)
        self._readers.join(cells, epochs, instruction, self._sets)

    def write(
        self,
        actors: Ints,
        addresses: Ints,
        width: int,
        instruction: int,
        values: Values | None = None,
        old: Callable[[], Values] | None = None,
    ) -> None:
        """Records that lanes write.  The arguments up to `instruction` are those of `read`.

        `values` are the stored registers.  `old` is a function that returns the earlier values; it is called only at a
        race.  If both arguments are given, a race is marked if the write does not change the value."""
        epochs, cells = self.epochs(actors), self._cells(addresses, width)
        for kind, touched in (
            ("write-write", self._writes),
            ("read-write", self._readers),
            ("read-write", self._polls),
        ):
            self._meet(kind, touched, actors, epochs, cells, instruction, values, old)
        # An atomic that comes after the write changes the value once more, whatever it left before the write.
        self._meet("write-write", self._atomics, actors, epochs, cells, instruction)
        # An access that is ordered after this write is also ordered after all that came before it.
        self._readers.clear(cells)
        self._atomics.clear(cells)
        self._polls.clear(cells)
        self._near.clear(cells)
        self._writes.replace(cells, self._sets.of_epochs(epochs), instruction)
        self._collide(actors, epochs, cells, instruction, values)

    def atomic(self, actors: Ints, addresses: Ints, width: int, instruction: int, near: bool = False) -> None:
        """Records an atomic operation of lanes, with the arguments of `read`.  Only `synchronise` orders accesses.

        An operation of .cluster scope (`near`) is not atomic for CTAs of other clusters."""
        epochs, cells = self.epochs(actors), self._cells(addresses, width)
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
        epochs, cells = self.epochs(actors), self._cells(addresses, width)
        self._meet("write-read", self._writes, actors, epochs, cells, instruction)
        other_atomics = self._atomics if near else self._near
        self._meet("write-read", other_atomics, actors, epochs, cells, instruction, beyond=True)
        self._polls.join(cells, epochs, instruction, self._sets)

    def _cells(self, addresses: Ints, width: int) -> Ints:
        """Returns the granules that contain each access, numbered over all allocations: (n, k)."""
        count = width >> self._shift or 1
        span = self._spans.get(count)
        if span is None:
            span = self._spans[count] = np.arange(count)
        flat = addresses.astype(np.int64, copy=False)
        moves = self._moves.take(self._bases.searchsorted(flat, side="right") - 1)
        return ((flat + moves) >> self._shift)[:, None] + span

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
    ) -> None:
        """Reports CTAs that accessed `cells` before and are not ordered before the current access.

        With `beyond`, only CTAs of other clusters are reported."""
        if touched.untouched:
            return
        sets = touched.sets.take(cells)
        is_other = (sets != 0) & (sets != self._sets.of_epochs(epochs)[:, None])
        if not is_other.any():
            return
        lanes, columns = np.nonzero(is_other)
        pairs, inverse = np.unique(actors[lanes] << 32 | sets[is_other], return_inverse=True)
        unknown = [self.unknown(int(pair) >> 32, self._sets.members[int(pair) & 0xFFFFFFFF], beyond) for pair in pairs]
        if not any(unknown):
            return
        same_value = np.zeros(actors.size, np.bool_)
        if values is not None and old is not None:
            same_value = equal(chosen(values, last_of(cells[:, 0] << 32 | actors)), old(), actors.size)
        keys = touched.instructions[cells[is_other]].astype(np.int64) << 32 | inverse << 1 | same_value[lanes]
        for first, count in zip(*np.unique(keys, return_index=True, return_counts=True)[1:], strict=True):
            epochs_left = unknown[int(inverse[first])]
            if epochs_left:
                lane, cell = int(lanes[first]), int(cells[lanes[first], columns[first]])
                owner = self.owners[(epochs_left & -epochs_left).bit_length() - 1]
                earlier = int(touched.instructions[cell])
                cta = int(actors[lane]) // self.warps
                self._add(kind, earlier, instruction, owner, cta, cell, bool(same_value[lane]), int(count))

    def _collide(self, actors: Ints, epochs: Int32Array, cells: Ints, instruction: int, values: Values | None) -> None:
        """Reports CTAs that wrote the same granule in the same instruction."""
        mine = self._sets.of_epochs(epochs)
        first = cells[:, 0]
        lost_mask = self._writes.sets.take(first) != mine
        if not lost_mask.any():
            return
        losers = np.flatnonzero(lost_mask)
        # A granule keeps the write of its last lane.
        last = last_of(first)[losers]
        ctas = actors // self.warps
        apart = ctas[losers] != ctas[last]
        losers, last = losers[apart], last[apart]
        same_value: Bools = np.zeros(losers.size, np.bool_)
        if values is not None:
            stays = last_of(first << 32 | ctas)[losers]
            same_value = equal(chosen(values, stays), chosen(values, last), losers.size)
        for leaves_same in (False, True):
            hits = np.flatnonzero(same_value == leaves_same)
            if hits.size:
                index = int(hits[0])
                first_cta, second_cta = (int(actors[lane]) // self.warps for lane in (losers[index], last[index]))
                cell = int(first[losers[index]])
                self._add("write-write", instruction, instruction, first_cta, second_cta, cell, leaves_same, hits.size)

    def _add(self, kind: str, first: int, second: int, owner: int, cta: int, cell: int, same: bool, count: int) -> None:
        flat = cell << self._shift
        allocation_index = int((self._bases + self._moves).searchsorted(flat, side="right")) - 1
        address = flat - int(self._moves[allocation_index])
        names = f"CTA {owner}", f"CTA {cta}"
        self.findings.add(Race("global", kind, first, second, *names, address, -1, same_value=same, count=count))
