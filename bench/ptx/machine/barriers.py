"""CTA barriers: `bar` and `barrier` (PTX ISA 8.7, section 9.7.13.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine import barrier_order
from rooflab.bench.ptx.machine.context import PARKED, Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import Group

BARRIERS = 16
"""Barriers of a CTA."""


@dataclass
class _State:
    """One barrier of one CTA between two completions."""

    arrived: int = 0
    wanted: int | None = None
    """Threads, as the instruction says; None for all of the CTA that have not ended."""
    whole: bool = False
    """Whether somebody waits for all threads of the CTA, without a number."""
    parked: list[Context] = field(default_factory=list)
    votes: int = 0
    voters: int = 0
    settlers: list[Callable[[int, int], None]] = field(default_factory=list)
    """What gives the threads of a `bar.red` its result: from the votes and the voters."""
    waiters: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """Warps that wait; those of `bar.arrive` do not."""


class Barriers:
    """The barriers of a group, by CTA and number."""

    def __init__(self, group: Group, resume: Callable[[list[Context]], None]):
        self._group = group
        self._resume = resume
        self._states: dict[tuple[int, int], _State] = {}
        self._missing: dict[int, int] = {}
        """By context (its id), how many CTAs' barriers it still waits for."""

    def any(self) -> bool:
        """Whether somebody waits."""
        return any(state.parked for state in self._states.values())

    def sync(
        self,
        context: Context,
        number: int,
        count: int | None,
        following: int,
        instruction: int,
        vote: tuple[np.ndarray[Any, Any], Callable[[Context, int, int], None]] | None = None,
    ) -> int:
        """Arrives and waits.  Where the context goes on, or `PARKED`.

        `vote` is of a `bar.red`: each lane's predicate, and what takes the votes and the voters when all have come.
        """
        group = self._group
        if vote is not None:
            self._vote(context, number, *vote, instruction)
        if context.slot is not None:
            done = self._arrive(
                context, context.slot, context.lanes, number, count, waits=True, instruction=instruction
            )
            if done:
                return following
            context.place = following
            self._missing[id(context)] = 1
            return PARKED
        slots = np.unique(context.slots)
        if count is None and vote is None and context.size == np.count_nonzero(group.alive) and not self._states:
            barrier_order.complete_for_all(group, context.warps)
            return following
        missing = 0
        context.place = following
        for slot in map(int, slots):
            lanes = context.lanes[context.slots == slot]
            missing += not self._arrive(context, slot, lanes, number, count, waits=True, instruction=instruction)
        if not missing:
            return following
        self._missing[id(context)] = missing
        return PARKED

    def too_many(
        self, context: Context, number: int, count: int | None, instruction: int
    ) -> npt.NDArray[np.bool_] | None:
        """Which lanes come when the barrier is complete without them, and begin its next turn; None where none do.

        Raises `Fault` on a number or a count that no barrier has.
        """
        if not 0 <= number < BARRIERS:
            raise Fault(f"a barrier's number is 0 to {BARRIERS - 1}, got {number}", instruction)
        if count is None:
            return None
        if count <= 0 or count % 32:
            raise Fault(f"a barrier wants a multiple of 32 threads, got {count}", instruction)
        if context.warps[0] == context.warps[-1]:
            return None
        late = np.zeros(context.size, np.bool_)
        for slot in map(int, np.unique(context.slots)):
            state = self._states.get((slot, number))
            warps = np.unique(context.warps[context.slots == slot])
            room = (count - state.arrived if state is not None else count) // 32
            if len(warps) > room > 0:
                late |= (context.slots == slot) & (context.warps >= warps[room])
        return late if late.any() else None

    def _vote(
        self,
        context: Context,
        number: int,
        yes: np.ndarray[Any, Any],
        settle: Callable[[Context, int, int], None],
        instruction: int,
    ) -> None:
        if context.slot is None:
            raise Fault("bar.red runs one CTA at a time", instruction)
        state = self._states.setdefault((context.slot, number), _State())
        state.votes += int(np.count_nonzero(yes))
        state.voters += context.size
        state.settlers.append(lambda votes, voters: settle(context, votes, voters))

    def arrive(self, context: Context, number: int, count: int | None, instruction: int) -> None:
        """Arrives and goes on."""
        for slot in map(int, np.unique(context.slots)):
            lanes = context.lanes[context.slots == slot]
            self._arrive(context, slot, lanes, number, count, waits=False, instruction=instruction)

    def _arrive(
        self,
        context: Context,
        slot: int,
        lanes: np.ndarray[Any, Any],
        number: int,
        count: int | None,
        *,
        waits: bool,
        instruction: int,
    ) -> bool:
        """Whether the barrier is complete with these lanes."""
        state = self._states.setdefault((slot, number), _State())
        warps = np.unique(lanes >> 5)
        state.whole |= count is None
        if state.wanted is None:
            state.wanted = count
        all_threads = self._group.lanes_per_cta
        counts = {given for given in (state.wanted, count, all_threads if state.whole else None) if given is not None}
        if state.wanted is not None and len(counts) > 1:
            texts = " and by ".join(str(given) for given in sorted(counts))
            raise Fault(f"barrier {number} is awaited by {texts} threads", instruction)
        # Whole warps count, those whose threads have ended in part as well.
        state.arrived += 32 * len(warps)
        if waits:
            state.parked.append(context)
            state.waiters.append(warps)
        else:
            barrier_order.arrives(self._group, slot, number, warps)
        if not self._complete(slot, state):
            return False
        if waits:
            state.parked.remove(context)
        self._release(slot, number, state, instruction)
        return True

    def _complete(self, slot: int, state: _State) -> bool:
        wanted = state.wanted
        if wanted is None:
            first = slot * self._group.lanes_per_cta
            alive = self._group.alive[first : first + self._group.lanes_per_cta].reshape(-1, 32).any(axis=1)
            wanted = 32 * int(np.count_nonzero(alive))
        return state.arrived >= wanted > 0

    def _release(self, slot: int, number: int, state: _State, instruction: int) -> None:
        del self._states[(slot, number)]
        for settle in state.settlers:
            settle(state.votes, state.voters)
        waiters = np.concatenate(state.waiters) if state.waiters else np.empty(0, np.int64)
        barrier_order.complete(self._group, slot, number, waiters)
        went = []
        for context in state.parked:
            left = self._missing.pop(id(context), 1) - 1
            if left:
                self._missing[id(context)] = left
            else:
                went.append(context)
        self._resume(went)

    def recheck(self) -> bool:
        """Looks again after threads have ended; whether somebody can go on."""
        went = False
        for (slot, number), state in list(self._states.items()):
            if state.parked and self._complete(slot, state):
                self._release(slot, number, state, -1)
                went = True
        return went

    def describe(self) -> list[tuple[Context, str]]:
        """Who waits, and for how many."""
        found = []
        for (_, number), state in self._states.items():
            wanted = "all" if state.wanted is None else str(state.wanted)
            text = f"for barrier {number}, where {state.arrived} of {wanted} threads are,"
            found += [(context, text) for context in state.parked]
        return found
