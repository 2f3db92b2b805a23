"""Records the order between the CTAs of a grid as sets of epochs, because few CTAs ever synchronise with another CTA.

An epoch is the work of a CTA between two of its releases.  If the CTA's warps are distinguished, an epoch is the work
of one warp between two steps of its clock.  Epochs are numbered over the grid as they begin; 0 means no epoch.  A set
of epochs is an integer with one bit per epoch.  An actor is a CTA or a warp.  Its vector clock is the set of epochs
that it knows.

CTAs synchronise through atomics, strong loads and strong stores on one global address (PTX ISA 8.7, section "Memory
Consistency Model").  A release pattern is a .release, or a fence before the access.  An acquire pattern is an .acquire,
or a fence after the access.  Fences and atomics of .cta scope order nothing here.  Fences and atomics of .cluster scope
(`near`) order only CTAs of one cluster, so their releases are stored separately.  A warp releases its own actions, and
the actions of its CTA's other warps up to their last barrier.  The other warps learn of an acquire in the same way.
`attach` gives the clocks that record these barriers; CTAs of a cluster share clocks.  Without clocks, a CTA is one
actor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.vector_clocks import GENERIC, VectorClocks

_CLOCK_SHIFT = 32
"""The number of bits of a stamp below the bits of its clock."""
_CLOSED = -1
"""The value that stands for a clock where the actor's next access begins an epoch."""


class _Log:
    """Stores the sets of epochs that the warps of a CTA knew, each with the warp and the warp's clock."""

    def __init__(self, warps: int) -> None:
        self._clocks: list[list[int]] = [[] for _ in range(warps)]
        self._sets: list[list[int]] = [[] for _ in range(warps)]

    def add(self, warp: int, clock: int, epochs: int) -> None:
        """Records that `warp` knows `epochs` from the clock value `clock` on.  A warp's clock only grows."""
        sets = self._sets[warp]
        sets.append(epochs | (sets[-1] if sets else 0))
        self._clocks[warp].append(clock)

    def seen_by(self, limits: Sequence[int]) -> int:
        """Returns the union of the sets of epochs that the warps knew at clock values below the limit of each warp."""
        known_epochs = 0
        for clocks, sets, limit in zip(self._clocks, self._sets, limits, strict=True):
            count = bisect_left(clocks, limit)
            if count:
                known_epochs |= sets[count - 1]
        return known_epochs


_Logs = dict[int, _Log]
"""By CTA, or by the leader of a cluster, the log."""


class CtaOrder:
    """Stores the order between `ctas` CTAs of `warps` warps each.  `warps` is 1 if warps are not distinguished.

    An actor is a warp of the grid, number `cta * warps + warp`.  Raises `ValueError` if `ctas` or `warps` is below 1.
    """

    def __init__(self, ctas: int, warps: int = 1) -> None:
        if ctas < 1:
            raise ValueError(f"ctas: expected at least 1, got {ctas}")
        if warps < 1:
            raise ValueError(f"warps: expected at least 1, got {warps}")
        self.ctas, self.warps = ctas, warps
        self.restart()

    def restart(self) -> None:
        """Clears the whole state before another grid begins."""
        count = self.ctas * self.warps
        self.current: npt.NDArray[np.int32] = np.zeros(count, np.int32)
        """By actor, the actor's current epoch; 0 before its first access."""
        self.owners: list[int] = [-1]
        """By epoch, the CTA that the epoch belongs to."""
        self._since: npt.NDArray[np.int64] = np.full(count, _CLOSED, np.int64)
        self._clocks: dict[int, tuple[VectorClocks, int, int]] = {}
        """By CTA: the CTA's vector clocks, its slot in the clocks, and its first warp in the slot."""
        self._leaders: dict[int, int] = {}
        """By CTA that shares clocks with other CTAs: the CTA whose log serves all of them."""
        self._epochs_of: dict[int, int] = {}
        """By CTA, the set of the CTA's epochs."""
        self._clusters: dict[int, int] = {}
        """By leader, the set of the epochs of the leader's cluster."""
        self._known: _Logs = {}
        """By CTA, the log of the epochs that the CTA's warps know."""
        self._fenced: _Logs = {}
        self._observed: _Logs = {}
        self._fenced_near: _Logs = {}
        self._observed_near: _Logs = {}
        self._released: dict[Hashable, int] = {}

    def attach(self, cta: int, clocks: VectorClocks, slot: int, first: int = 0, leader: int | None = None) -> None:
        """Takes the clocks of the warps of `cta` from `slot` of `clocks` from now on, beginning with warp `first`.

        CTAs of a cluster share a slot.  They all give the same CTA of the cluster as their `leader`."""
        self._clocks[cta] = clocks, slot, first
        if leader is not None:
            self._leaders[cta] = leader

    def epochs(self, actors: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Returns the current epochs of `actors` (n,).  An actor begins one if it has none or its clock advanced."""
        if self._clocks:
            # A warp's lanes are adjacent: finding the few runs of equal actors costs less than finding distinct values.
            for actor in map(int, actors[np.flatnonzero(np.diff(actors, prepend=-1))]):
                if self._since[actor] != self._clock(actor):
                    self._begin(actor)
            return self.current.take(actors)
        if (self._since.take(actors) == _CLOSED).any():
            for actor in map(int, np.unique(actors[self._since.take(actors) == _CLOSED])):
                self._begin(actor)
        return self.current.take(actors)

    def fence(self, actor: int, near: bool = False) -> None:
        """Records a fence: it acquires observed releases.  Later atomics then release the actor's earlier actions."""
        observed_epochs = self._seen(self._observed_near, actor) | (0 if near else self._seen(self._observed, actor))
        if observed_epochs:
            self._note(self._known, actor, observed_epochs)
        self._note(self._fenced_near if near else self._fenced, actor, self._seen(self._known, actor))
        self._since[actor] = _CLOSED

    def synchronise(
        self,
        actor: int,
        address: int,
        release: bool = False,
        acquire: bool = False,
        stores: bool = True,
        near: bool = False,
    ) -> None:
        """Records an atomic or strong store on `address`, or without `stores` a strong load.

        `near` means .cluster scope.  Callers also call `GlobalRaces.atomic` or `GlobalRaces.poll`.
        """
        channels: list[tuple[Hashable, _Logs, tuple[_Logs, ...]]] = []
        if not near:
            channels.append((address, self._observed, (self._fenced,)))
        if self._leaders:
            near_place = address, self._leaders[actor // self.warps]
            channels.append((near_place, self._observed_near, (self._fenced, self._fenced_near)))
        for channel, observed, _ in channels:
            if released_epochs := self._released.get(channel, 0):
                self._note(self._known if acquire else observed, actor, released_epochs)
        if not stores:
            return  # no other CTA can observe a load
        for channel, _, fenced in channels:
            epoch_sets = (self._seen(log, actor) for log in ((self._known,) if release else fenced))
            self._released[channel] = reduce(or_, epoch_sets, self._released.get(channel, 0))
        if release:
            self._since[actor] = _CLOSED

    def unknown(self, actor: int, epochs: int, beyond: bool = False) -> int:
        """Returns those of `epochs` that belong to other CTAs and are not ordered before the actor's next access.

        With `beyond`, only epochs of other clusters are returned."""
        cta = actor // self.warps
        other_epochs = epochs & ~(self._clusters.get(self._leaders[cta], 0) if beyond else self._epochs_of.get(cta, 0))
        return other_epochs and other_epochs & ~self._seen(self._known, actor)

    def _begin(self, actor: int) -> None:
        cta, epoch = actor // self.warps, len(self.owners)
        self.owners.append(cta)
        self.current[actor] = epoch
        self._since[actor] = self._clock(actor)
        self._epochs_of[cta] = self._epochs_of.get(cta, 0) | 1 << epoch
        if (leader := self._leaders.get(cta)) is not None:
            self._clusters[leader] = self._clusters.get(leader, 0) | 1 << epoch
        self._note(self._known, actor, 1 << epoch)

    def _clock(self, actor: int) -> int:
        cta, warp = divmod(actor, self.warps)
        if cta not in self._clocks:
            return 0
        clocks, slot, first = self._clocks[cta]
        return int(clocks.current[slot, first + warp]) >> _CLOCK_SHIFT

    def _limits(self, actor: int) -> Sequence[int]:
        cta, warp = divmod(actor, self.warps)
        if cta not in self._clocks:
            return [1] * self.warps
        clocks, slot, first = self._clocks[cta]
        limits: list[int] = (clocks.known[GENERIC, slot, first + warp, : clocks.warps] >> _CLOCK_SHIFT).tolist()
        return limits

    def _note(self, logs: _Logs, actor: int, epochs: int) -> None:
        cta, warp = divmod(actor, self.warps)
        leader, first, count = cta, 0, self.warps
        if cta in self._clocks:
            clocks, _, first = self._clocks[cta]
            leader, count = self._leaders.get(cta, cta), clocks.warps
        if leader not in logs:
            logs[leader] = _Log(count)
        logs[leader].add(first + warp, self._clock(actor), epochs)

    def _seen(self, logs: _Logs, actor: int) -> int:
        cta = actor // self.warps
        log = logs.get(self._leaders.get(cta, cta))
        return 0 if log is None else log.seen_by(self._limits(actor))
