"""The barrier of a cluster, and the registers that warps hand to one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rooflab.bench.ptx.machine.context import PARKED, Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import Group

_KEY = "cluster"


class ClusterBarrier:
    """`barrier.cluster` (PTX ISA 8.7, section 9.7.13.4): all threads of the cluster, arriving and waiting apart."""

    def __init__(self, group: Group, resume: Callable[[list[Context]], None]):
        self._group = group
        self._resume = resume
        self._arrived = np.zeros(len(group.alive), np.int64)
        self._waited = np.zeros(len(group.alive), np.int64)
        self._parked: list[Context] = []
        self._phase = 0
        """How often all have arrived."""

    def any(self) -> bool:
        """Whether somebody waits."""
        return bool(self._parked)

    def arrive(self, context: Context, release: bool, instruction: int) -> None:
        """These threads have arrived.  Raises `Fault` where they did so before, and have not waited since."""
        if (self._arrived > self._waited)[context.lanes].any():
            raise Fault("a thread arrives at the cluster's barrier again before it has waited there", instruction)
        self._arrived[context.lanes] += 1
        if self._group.races is not None:
            for slot, warps in self._warps(context):
                (self._group.races.signal if release else self._group.races.signal_inits)(slot, warps, _KEY)
        self.recheck()

    def wait(self, context: Context, following: int, instruction: int) -> int:
        """Goes on when all threads have arrived as often as these.  Raises `Fault` where these have not."""
        if (self._arrived == self._waited)[context.lanes].any():
            raise Fault("a thread waits at the cluster's barrier and has not arrived there", instruction)
        self._waited[context.lanes] += 1
        context.place = following
        if self._complete(context):
            self._learn(context)
            return following
        self._parked.append(context)
        return PARKED

    def _complete(self, context: Context) -> bool:
        wanted = int(self._arrived[context.lanes].max())
        return bool((self._arrived[self._group.alive] >= wanted).all())

    def _end_phase(self) -> None:
        """All have arrived: who waits learns what was released up to now."""
        if self._group.races is not None:
            for slot in range(self._group.races.slots):
                self._group.races.complete(slot, _KEY)

    def _learn(self, context: Context) -> None:
        if self._group.races is not None:
            for slot, warps in self._warps(context):
                self._group.races.wait(slot, warps, _KEY)

    def _warps(self, context: Context) -> list[tuple[int, np.ndarray[Any, Any]]]:
        """A context's warps by the race detector's slots, of which one is a whole cluster."""
        each, per_slot = np.unique(context.warps), self._group.race_warps
        return [(int(slot), each[each // per_slot == slot] % per_slot) for slot in np.unique(each // per_slot)]

    def recheck(self) -> bool:
        """Whether somebody can go on now."""
        alive = self._group.alive
        phase = int(self._arrived[alive].min()) if alive.any() else self._phase
        if phase > self._phase:
            self._phase = phase
            self._end_phase()
        went = [context for context in self._parked if self._complete(context)]
        for context in went:
            self._learn(context)
        self._parked = [context for context in self._parked if context not in went]
        self._resume(went)
        return bool(went)

    def describe(self) -> list[tuple[Context, str]]:
        """Who waits."""
        return [(context, "for the cluster's barrier") for context in self._parked]


class Registers:
    """`setmaxnreg` (PTX ISA 8.7, section 9.7.20.5): a CTA's registers, moved between its warps.

    Which warps give theirs back first is a matter of time, so that only the sum at the end is held against the budget.
    """

    BUDGET = 65536
    """Registers of a multiprocessor."""

    def __init__(self, group: Group):
        self._group = group
        warps = len(group.alive) // 32
        self._at_launch = group.program.kernel.max_registers
        self._of_warp = np.full(warps, self._at_launch or 0)
        self._last = -1

    def set(self, context: Context, count: int, increase: bool, instruction: int) -> None:
        """The warps of `context` have `count` registers a thread from now on.  Raises `Fault` on a wrong move."""
        if self._at_launch is None:
            raise Fault("setmaxnreg needs a kernel with .maxnreg, which says what the warps begin with", instruction)
        warps = np.unique(context.warps)
        have = int(self._of_warp[warps].max()) if increase else int(self._of_warp[warps].min())
        if increase and count < have or not increase and count > have:
            raise Fault(f"setmaxnreg.{'inc' if increase else 'dec'} from {have} to {count} registers", instruction)
        self._of_warp[warps] = count
        self._last = instruction
        per_cta = self._group.lanes_per_cta // 32
        first = int(warps[0]) // per_cta * per_cta
        own = self._of_warp[first : first + per_cta]
        budget = self._at_launch * per_cta * 32
        if 32 * int(own[warps - first].sum()) > budget:
            raise Fault(f"setmaxnreg asks for more registers than the CTA's {budget}", instruction)

    def check(self) -> None:
        """Raises `Fault` where the warps of a CTA hold more than it was given."""
        if self._last < 0 or self._at_launch is None:
            return
        per_cta = self._group.lanes_per_cta // 32
        for first in range(0, len(self._of_warp), per_cta):
            held = 32 * int(self._of_warp[first : first + per_cta].sum())
            if held > self._at_launch * per_cta * 32:
                text = f"the CTA's warps hold {held} registers in the end, of {self._at_launch * per_cta * 32} there"
                raise Fault(text, self._last)
