"""Which epochs have touched each granule of global memory: sets kept once and known by number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


class EpochSets:
    """Sets of epochs by number, each kept once; set 0 is empty."""

    def __init__(self) -> None:
        self.members: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._joined: dict[tuple[int, int], int] = {}
        self._single: Numbers = np.zeros(1024, np.int32)

    def of_epochs(self, epochs: Numbers) -> Numbers:
        """(n,): the sets of one epoch each."""
        if int(epochs.max()) >= self._single.size:
            self._single = np.concatenate([self._single, np.zeros(int(epochs.max()) + 1, np.int32)])
        sets = self._single.take(epochs)
        if not sets.all():
            for epoch in np.unique(epochs[sets == 0]):
                self._single[epoch] = self._number(1 << int(epoch))
            sets = self._single.take(epochs)
        return sets

    def joined(self, number: int, epoch: int) -> int:
        """The set `number` with `epoch` too."""
        known = self._joined.get((number, epoch))
        if known is None:
            known = self._joined[(number, epoch)] = self._number(self.members[number] | 1 << epoch)
        return known

    def _number(self, members: int) -> int:
        number = self._numbers.setdefault(members, len(self.members))
        if number == len(self.members):
            self.members.append(members)
        return number


class Touched:
    """By granule: the set of epochs that touched it one way since its last write, and the last instruction."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.untouched = True

    def join(self, cells: Ints, epochs: Numbers, instruction: int, sets: EpochSets) -> None:
        """Add each lane's epoch (n,) to the sets of its `cells` (n, k)."""
        mine = sets.of_epochs(epochs)[:, None]
        self._touch()
        before = self.sets.take(cells)
        self.instructions[cells] = instruction
        if ((before == 0) | (before == mine)).all():
            self.sets[cells] = mine
            if (mine == mine[0]).all() or (self.sets.take(cells) == mine).all():
                return
        # Others have touched these granules too, before or in this instruction.
        for epoch in np.unique(epochs):
            own = cells[epochs == epoch]
            before = self.sets.take(own)
            if before.min() == before.max():
                self.sets[own] = sets.joined(int(before.flat[0]), int(epoch))
            else:
                numbers, inverse = np.unique(before, return_inverse=True)
                joined = np.array([sets.joined(int(number), int(epoch)) for number in numbers], np.int32)
                self.sets[own] = joined[inverse].reshape(own.shape)

    def replace(self, cells: Ints, numbers: Numbers, instruction: int) -> None:
        """Forget who touched `cells` (n, k): now each lane's set (n,) has."""
        self._touch()
        self.sets[cells] = numbers[:, None]
        self.instructions[cells] = instruction

    def clear(self, cells: Ints) -> None:
        """Forget who touched `cells`."""
        if not self.untouched:
            self.sets[cells] = 0

    def _touch(self) -> None:
        """Makes the tables at the first touch: of five kinds that each grid could have, most have two."""
        if self.untouched:
            self.untouched = False
            self.sets: Numbers = np.zeros(self._count, np.int32)
            self.instructions: Numbers = np.zeros(self._count, np.int32)
