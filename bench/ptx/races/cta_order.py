"""What is ordered before what between the CTAs of a grid: sets of epochs, since few CTAs ever learn of another.

An epoch is what a CTA did between two of its releases, or where its warps are told apart, what a warp did between two
steps of its clock; epochs are numbered over the grid as they begin, 0 is none.  A set of epochs is the bits of an
integer, and a vector clock is the set of epochs that somebody knows.

CTAs learn of each other through atomics (and strong loads and stores) on one global address, as PTX ISA 8.7, section
"Memory Consistency Model", wants it: a release pattern is a .release, or a fence before; an acquire pattern is an
.acquire, or a fence after.  Fences and atomics of .cta scope order nothing here.  What a warp releases is what it has
done itself and what its CTA's other warps had done when it last met them, and these learn from it in the same way:
`attach` says whose clocks know about that.  Without, a CTA counts as one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.races.vector_clocks import GENERIC, VectorClocks

_CLOCK_SHIFT = 32
"""A stamp's clock stands above these bits."""
_CLOSED = -1
"""No clock: the next access begins an epoch."""


class _Log:
    """Sets of epochs that the warps of a CTA came to have, each with the warp and its clock."""

    def __init__(self, warps: int) -> None:
        self._clocks: list[list[int]] = [[] for _ in range(warps)]
        self._sets: list[list[int]] = [[] for _ in range(warps)]

    def add(self, warp: int, clock: int, epochs: int) -> None:
        """`warp` has `epochs` from `clock` on; its clock only grows."""
        sets = self._sets[warp]
        sets.append(epochs | (sets[-1] if sets else 0))
        self._clocks[warp].append(clock)

    def seen_by(self, limits: Sequence[int]) -> int:
        """All that the warps had at clocks below each one's limit."""
        found = 0
        for clocks, sets, limit in zip(self._clocks, self._sets, limits, strict=True):
            count = bisect_left(clocks, limit)
            if count:
                found |= sets[count - 1]
        return found


class CtaOrder:
    """Epochs of `ctas` CTAs of `warps` warps: 1 where they are not told apart.

    An actor is a warp of the grid, number `cta * warps + warp`.  Raises `ValueError` on fewer than one of either.
    """

    def __init__(self, ctas: int, warps: int = 1) -> None:
        if ctas < 1:
            raise ValueError(f"ctas: expected at least 1, got {ctas}")
        if warps < 1:
            raise ValueError(f"warps: expected at least 1, got {warps}")
        self.ctas, self.warps = ctas, warps
        self.restart()

    def restart(self) -> None:
        """Another grid begins."""
        count = self.ctas * self.warps
        self.current: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        """By actor: its epoch; 0 before it first did something."""
        self.owners: list[int] = [-1]
        """By epoch: its CTA."""
        self._since: npt.NDArray[np.int64] = np.full(count, _CLOSED, np.int64)
        self._clocks: dict[int, tuple[VectorClocks, int]] = {}
        self._own: dict[int, int] = {}
        self._known: dict[int, _Log] = {}
        self._fenced: dict[int, _Log] = {}
        self._observed: dict[int, _Log] = {}
        self._released: dict[int, int] = {}

    def attach(self, cta: int, clocks: VectorClocks, slot: int) -> None:
        """The warps of `cta` are from now on those of `slot`."""
        self._clocks[cta] = clocks, slot

    def epochs(self, actors: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The current epochs of `actors` (n,), begun where one has none yet or its clock has gone on."""
        if self._clocks:
            for actor in map(int, np.unique(actors)):
                if self._since[actor] != self._clock(actor):
                    self._begin(actor)
            return self.current.take(actors)
        if (self._since.take(actors) == _CLOSED).any():
            for actor in map(int, np.unique(actors[self._since.take(actors) == _CLOSED])):
                self._begin(actor)
        return self.current.take(actors)

    def fence(self, actor: int) -> None:
        """fence of .gpu or .sys scope: what was observed is acquired, what was done will be released by atomics."""
        seen = self._seen(self._observed, actor)
        if seen:
            self._note(self._known, actor, seen)
        self._note(self._fenced, actor, self._seen(self._known, actor))
        self._since[actor] = _CLOSED

    def synchronise(
        self, actor: int, address: int, release: bool = False, acquire: bool = False, stores: bool = True
    ) -> None:
        """An atomic, a strong store or, without `stores`, a strong load on `address`.

        Call it beside `GlobalRaces.atomic` or `poll`.
        """
        seen = self._released.get(address, 0)
        if seen:
            self._note(self._known if acquire else self._observed, actor, seen)
        if not stores:
            return  # nobody can see that it was there
        self._released[address] = seen | self._seen(self._known if release else self._fenced, actor)
        if release:
            self._since[actor] = _CLOSED

    def unknown(self, actor: int, epochs: int) -> int:
        """Those of a set of epochs, other CTAs', that are not ordered before what `actor` does now."""
        others = epochs & ~self._own.get(actor // self.warps, 0)
        return others and others & ~self._seen(self._known, actor)

    def _begin(self, actor: int) -> None:
        cta, epoch = actor // self.warps, len(self.owners)
        self.owners.append(cta)
        self.current[actor] = epoch
        self._since[actor] = self._clock(actor)
        self._own[cta] = self._own.get(cta, 0) | 1 << epoch
        self._note(self._known, actor, 1 << epoch)

    def _clock(self, actor: int) -> int:
        cta, warp = divmod(actor, self.warps)
        if cta not in self._clocks:
            return 0
        clocks, slot = self._clocks[cta]
        return int(clocks.current[slot, warp]) >> _CLOCK_SHIFT

    def _limits(self, actor: int) -> Sequence[int]:
        cta, warp = divmod(actor, self.warps)
        if cta not in self._clocks:
            return [1] * self.warps
        clocks, slot = self._clocks[cta]
        limits: list[int] = (clocks.known[GENERIC, slot, warp, : self.warps] >> _CLOCK_SHIFT).tolist()
        return limits

    def _note(self, logs: dict[int, _Log], actor: int, epochs: int) -> None:
        cta, warp = divmod(actor, self.warps)
        if cta not in logs:
            logs[cta] = _Log(self.warps)
        logs[cta].add(warp, self._clock(actor), epochs)

    def _seen(self, logs: dict[int, _Log], actor: int) -> int:
        log = logs.get(actor // self.warps)
        return 0 if log is None else log.seen_by(self._limits(actor))
