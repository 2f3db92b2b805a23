"""What is ordered before what between the CTAs of a grid: sets of epochs, since few CTAs ever learn of another.

An epoch is what a CTA did between two of its releases; epochs are numbered over the grid as they begin, 0 is none.  A
set of epochs is the bits of an integer, and a vector clock is the set of epochs that a CTA knows.

CTAs learn of each other through atomics (and strong loads and stores) on one global address, as PTX ISA 8.7, section
"Memory Consistency Model", wants it: a release pattern is a .release, or a fence before; an acquire pattern is an
.acquire, or a fence after.  Fences count for the whole CTA: that the threads of a CTA are ordered with the one that
fences is for the races on shared memory to see.  Fences and atomics of .cta scope order nothing here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class CtaOrder:
    """Epochs of `ctas` CTAs.  Raises `ValueError` on fewer than one."""

    def __init__(self, ctas: int) -> None:
        if ctas < 1:
            raise ValueError(f"ctas: expected at least 1, got {ctas}")
        self.ctas = ctas
        self.restart()

    def restart(self) -> None:
        """Another grid begins."""
        self.current: npt.NDArray[np.int32] = np.zeros(self.ctas, np.int32)
        """By CTA: its epoch; 0 before it first did something."""
        self.owners: list[int] = [-1]
        """By epoch: its CTA."""
        self._known: dict[int, int] = {}
        self._fenced: dict[int, int] = {}
        self._observed: dict[int, int] = {}
        self._released: dict[int, int] = {}

    def epochs(self, ctas: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The current epochs of `ctas` (n,), begun where a CTA has none yet."""
        epochs = self.current.take(ctas)
        if not epochs.all():
            for cta in np.unique(ctas[epochs == 0]):
                self._begin(int(cta))
            epochs = self.current.take(ctas)
        return epochs

    def fence(self, cta: int) -> None:
        """fence of .gpu or .sys scope: what `cta` observed is acquired, what it did will be released by its atomics."""
        self._learn(cta, self._observed.pop(cta, 0))
        self._fenced[cta] = self._all_of(cta)
        self._begin(cta)

    def synchronise(self, cta: int, address: int, release: bool = False, acquire: bool = False) -> None:
        """`cta` does an atomic, a strong load or a strong store on `address`; call it beside `GlobalRaces.atomic`."""
        seen = self._released.get(address, 0)
        if acquire:
            self._learn(cta, seen)
        else:
            self._observed[cta] = self._observed.get(cta, 0) | seen
        self._released[address] = seen | (self._all_of(cta) if release else self._fenced.get(cta, 0))
        if release:
            self._begin(cta)

    def unknown(self, cta: int, epochs: int) -> int:
        """Those of a set of epochs that are not ordered before what `cta` does now."""
        return epochs & ~self._all_of(cta)

    def _all_of(self, cta: int) -> int:
        if not self.current[cta]:
            self._begin(cta)
        return self._known[cta]

    def _learn(self, cta: int, epochs: int) -> None:
        self._known[cta] = self._all_of(cta) | epochs

    def _begin(self, cta: int) -> None:
        epoch = len(self.owners)
        self.owners.append(cta)
        self.current[cta] = epoch
        self._known[cta] = self._known.get(cta, 0) | 1 << epoch
