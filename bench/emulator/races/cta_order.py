"""Records the order between the memory accesses of a grid's CTAs, as sets of epochs (periods of work).

An actor is a CTA, or one warp of a CTA.  An epoch of an actor ends at a release, a fence, or a tick of the warp's
clock.  A set of epochs is an integer with one bit per epoch.  An actor knows an epoch if the epoch is ordered before
the actor's next access.

CTAs synchronise through atomics, strong loads and strong stores on one global address (PTX ISA 8.7, section "Memory
Consistency Model").  A release has .release, or follows a fence.  An acquire has .acquire, or precedes a fence.
Operations of .cta scope do not order CTAs.  Operations of .cluster scope (`near`) order only the CTAs of one cluster.
A copy by TMA also needs a proxy fence after what threads wrote (section "Proxies"), in any CTA that knows of it.

Few CTAs ever synchronise, so sets are enough.  Within a CTA, `VectorClocks` give the order of the warps.
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
_NO_CLOCK = -1
"""The value that stands for a clock where the actor's next access begins an epoch."""


class _Log:
    """Stores a list of entries for each warp of a CTA, in time order.  An entry has a set of epochs (periods of a CTA's
    work).  It also has the value of the warp's logical clock when the set was added."""

    def __init__(self, warps: int) -> None:
        self._clocks: list[list[int]] = [[] for _ in range(warps)]
        self._sets: list[list[int]] = [[] for _ in range(warps)]

    def add(self, warp: int, clock: int, epochs: int) -> None:
        """Adds the set `epochs` (periods of work, one bit each) to the history of `warp`.  `clock` is the current value
        of the warp's logical clock, and never decreases."""
        epoch_masks = self._sets[warp]
        epoch_masks.append(epochs | (epoch_masks[-1] if epoch_masks else 0))
        self._clocks[warp].append(clock)

    def seen_by(self, limits: Sequence[int]) -> int:
        """Returns a set of epochs (periods of a CTA's work), as an integer with one bit per epoch.  `limits` has one
        value of a logical clock for each warp.  The set has every epoch that was logged for a warp before the warp's
        limit."""
        known_epochs = 0
        for clocks, epoch_masks, clock_limit in zip(self._clocks, self._sets, limits, strict=True):
            mask_count = bisect_left(clocks, clock_limit)
            if mask_count:
                known_epochs |= epoch_masks[mask_count - 1]
        return known_epochs


_LogByCta = dict[int, _Log]
"""By CTA, or by the leader of a cluster, the log."""


class CtaOrder:
    """Tracks the order of accesses between `ctas` CTAs of `warps` warps each.  With `warps` of 1, tracks whole CTAs.

    An actor is a warp of the grid with the number `cta * warps + warp`.  Raises `ValueError` if `ctas` or `warps` is
    below 1."""

    def __init__(self, ctas: int, warps: int = 1) -> None:
        if ctas < 1:
            raise ValueError(f"ctas: expected at least 1, got {ctas}")
        if warps < 1:
            raise ValueError(f"warps: expected at least 1, got {warps}")
        self.ctas, self.warps = ctas, warps
        actor_count = ctas * warps
        self.current: npt.NDArray[np.int32] = np.zeros(actor_count, np.int32)
        """By actor, the actor's current epoch; 0 before its first access."""
        self.owners: list[int] = [-1]
        """By epoch, the CTA that the epoch belongs to."""
        self._since: npt.NDArray[np.int64] = np.full(actor_count, _NO_CLOCK, np.int64)
        self._clocks: dict[int, tuple[VectorClocks, int, int]] = {}
        """By CTA: the CTA's vector clocks, its slot in the clocks, and its first warp in the slot."""
        self._leaders: dict[int, int] = {}
        """By CTA that shares clocks with other CTAs: the CTA whose log serves all of them."""
        self._epochs_of: dict[int, int] = {}
        """By CTA, the set of the CTA's epochs."""
        self._clusters: dict[int, int] = {}
        """By leader, the set of the epochs of the leader's cluster."""
        self._known: _LogByCta = {}
        """By CTA, the log of the epochs that the CTA's warps know."""
        self._fenced: _LogByCta = {}
        self._observed: _LogByCta = {}
        self._fenced_near: _LogByCta = {}
        self._observed_near: _LogByCta = {}
        self._released: dict[Hashable, int] = {}
        self._proxied = 0
        """The set of the epochs that a proxy fence followed."""

    def attach(self, cta: int, clocks: VectorClocks, slot: int, first: int = 0, leader: int | None = None) -> None:
        """Stores the vector clocks of the CTA `cta`.  They record the order of the accesses by the CTA's warps.

        A cluster shares one entry of `clocks`.  `slot` is the index of the CTA's or cluster's entry.  `first` is the
        index of the CTA's first warp in this entry.  `leader` is the CTA that represents the cluster, or None without
        clusters.
        """
        self._clocks[cta] = clocks, slot, first
        if leader is not None:
            self._leaders[cta] = leader

    def epochs(self, actors: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Returns the number of the current epoch (period of work) of n warps or CTAs: `[n]`.  `actors` `[n]` has their
        numbers in the grid.  A warp or CTA without an open epoch begins a new one."""
        if self._clocks:
            # A warp's lanes are adjacent: finding the few runs of equal actors costs less than finding distinct values.
            for actor in map(int, actors[np.flatnonzero(np.diff(actors, prepend=-1))]):
                if self._since[actor] != self._clock(actor):
                    self._begin(actor)
            return self.current.take(actors)
        if (self._since.take(actors) == _NO_CLOCK).any():
            for actor in map(int, np.unique(actors[self._since.take(actors) == _NO_CLOCK])):
                self._begin(actor)
        return self.current.take(actors)

    def fence(self, actor: int, near: bool = False) -> None:
        """Records a memory fence of `actor`, a warp or a CTA.  The fence makes the actor's earlier strong loads and
        atomics acquires.  It makes the actor's later strong stores and atomics releases.  `near` means .cluster
        scope."""
        observed_epochs = self._seen(self._observed_near, actor) | (0 if near else self._seen(self._observed, actor))
        if observed_epochs:
            self._note(self._known, actor, observed_epochs)
        self._note(self._fenced_near if near else self._fenced, actor, self._seen(self._known, actor))
        self._since[actor] = _NO_CLOCK

    def proxy_fence(self, actor: int) -> None:
        """Records fence.proxy.async of `actor`, a warp or a CTA, for global memory.  TMA may then read what the actor
        knows."""
        self._proxied |= self._seen(self._known, actor)
        self._since[actor] = _NO_CLOCK

    def synchronise(
        self,
        actor: int,
        address: int,
        release: bool = False,
        acquire: bool = False,
        stores: bool = True,
        near: bool = False,
    ) -> None:
        """Records an atomic or a strong store on `address`.  If `stores` is false, records a strong load.

        `near` means .cluster scope.  Callers report the access itself by `GlobalRaces.atomic` or `GlobalRaces.poll`.
        """
        sync_channels: list[tuple[Hashable, _LogByCta, tuple[_LogByCta, ...]]] = []
        if not near:
            sync_channels.append((address, self._observed, (self._fenced,)))
        if self._leaders:
            cluster_channel = address, self._leaders[actor // self.warps]
            sync_channels.append((cluster_channel, self._observed_near, (self._fenced, self._fenced_near)))
        for sync_channel, observed_logs, _ in sync_channels:
            if released_epochs := self._released.get(sync_channel, 0):
                self._note(self._known if acquire else observed_logs, actor, released_epochs)
        if not stores:
            return  # no other CTA can observe a load
        for sync_channel, _, cta_logs in sync_channels:
            epoch_masks = (self._seen(cta_log, actor) for cta_log in ((self._known,) if release else cta_logs))
            self._released[sync_channel] = reduce(or_, epoch_masks, self._released.get(sync_channel, 0))
        if release:
            self._since[actor] = _NO_CLOCK

    def unknown(self, actor: int, epochs: int, beyond: bool = False, proxy: bool = False) -> int:
        """Returns the part of `epochs` that may race with the next access of `actor`, a warp or a CTA.

        An epoch is a period of a CTA's work.  A set of epochs is an integer with one bit per epoch.  The result leaves
        out epochs of the actor's own CTA, and epochs that are ordered before the access.  With `beyond`, it also leaves
        out epochs of the actor's cluster.  With `proxy`, it has the ordered epochs, also the actor's own, that no proxy
        fence followed."""
        if proxy:
            return epochs & ~self._proxied and epochs & ~self._proxied & self._seen(self._known, actor)
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
        clocks, slot, first_warp = self._clocks[cta]
        return int(clocks.current[slot, first_warp + warp]) >> _CLOCK_SHIFT

    def _limits(self, actor: int) -> Sequence[int]:
        cta, warp = divmod(actor, self.warps)
        if cta not in self._clocks:
            return [1] * self.warps
        clocks, slot, first = self._clocks[cta]
        clock_limits: list[int] = (clocks.known[GENERIC, slot, first + warp, : clocks.warps] >> _CLOCK_SHIFT).tolist()
        return clock_limits

    def _note(self, logs: _LogByCta, actor: int, epochs: int) -> None:
        cta, warp = divmod(actor, self.warps)
        leader, first_warp, warp_count = cta, 0, self.warps
        if cta in self._clocks:
            clocks, _, first_warp = self._clocks[cta]
            leader, warp_count = self._leaders.get(cta, cta), clocks.warps
        if leader not in logs:
            logs[leader] = _Log(warp_count)
        logs[leader].add(first_warp + warp, self._clock(actor), epochs)

    def _seen(self, logs: _LogByCta, actor: int) -> int:
        cta = actor // self.warps
        cta_log = logs.get(self._leaders.get(cta, cta))
        return 0 if cta_log is None else cta_log.seen_by(self._limits(actor))
