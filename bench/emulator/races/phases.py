"""Shows that no order of a run's arrivals and waits would change the phases of its barriers, or names what might.

The plane CONTROL of the vector clocks has the order that every run of the same paths has: that of the program, of
barriers, of waits for mbarriers, and of the four warps of a wgmma.  A run keeps three rules:

- an arrival comes after the end of the phase before its own;
- a wait comes before the end of the phase after the one it waits for;
- an expect_tx comes before some arrival of its own phase.

If CONTROL implies all three, then any other order gives each arrival the same phase, by induction over its events.  So
no order ends in a deadlock if this one does not, and no schedule has to be tried.  Where CONTROL does not imply one of
them, there is an order of the same events that breaks it first, and that is reported.  Strong and atomic accesses
to memory count as ordered as they came, so a fault that needs another order of them is not reported.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.races.reports import Findings, Race
from rooflab.bench.emulator.races.vector_clocks import (
    ACTOR_BITS,
    CONTROL,
    LOWER_MASK,
    AsyncOperation,
    IndexOrArray,
    VectorClocks,
)

_Event = tuple[int, int, int]
"""An actor, the stamp of its clock, and the number of an instruction."""
_MEMORY = "memory"
"""The key that stands for all strong and atomic accesses to memory."""


class BarrierPhases(VectorClocks):
    """Checks the order of arrivals and waits at the mbarriers and the numbered barriers of CTAs or of one cluster.

    The parameters are those of `VectorClocks`.  At most `limit` faults are stored, in `findings`."""

    def __init__(self, slots: int, warps: int, pool: int, ctas: Sequence[int], limit: int) -> None:
        super().__init__(slots, warps, pool, ctas)
        self.findings = Findings(limit)
        self._arrived: dict[tuple[int, Hashable], list[_Event]] = {}
        """By slot and barrier: the arrivals of the current phase."""
        self._before: dict[tuple[int, Hashable], list[_Event]] = {}
        """By slot and barrier: the arrivals that ended the phase before."""
        self._limits: dict[tuple[int, Hashable], dict[tuple[str, int, int], int]] = {}
        """By slot and mbarrier, then by kind, warp and instruction: stamps of what must precede the phase's end."""

    def arrive(self, slot: int, warps: IndexOrArray, key: Hashable, instruction: int, kind: str = "arrival") -> None:
        """Records that `warps` arrive at the barrier `key` in `slot`, before `signal` or `barrier` is called.

        `kind` is `arrival`, or `expect` for an expect_tx without an arrival, or `numbered` for a barrier of `bar.sync`
        and `bar.arrive`."""
        for warp in np.atleast_1d(warps).tolist():
            event = warp, int(self.current[slot, warp]), instruction
            self._check_arrival(slot, key, event, self.known[CONTROL, slot, warp], kind)
            if kind == "expect":
                self._limits.setdefault((slot, key), {})[kind, warp, instruction] = event[1]
            else:
                self._arrived.setdefault((slot, key), []).append(event)

    def signal_async(self, transfer: AsyncOperation, key: Hashable) -> None:
        """Records complete_tx: the asynchronous `transfer` arrives at the mbarrier `key`."""
        instruction = (int(self.latest[transfer.slot, transfer.actor]) & LOWER_MASK) >> ACTOR_BITS
        event = transfer.actor, transfer.stamp, instruction
        self._check_arrival(transfer.slot, key, event, transfer.known[CONTROL], "arrival")
        self._arrived.setdefault((transfer.slot, key), []).append(event)
        super().signal_async(transfer, key)

    def passed(self, slot: int, warps: IndexOrArray, key: Hashable, instruction: int) -> None:
        """Records that a wait of `warps` for the last phase of the mbarrier `key` is over."""
        waits = self._limits.setdefault((slot, key), {})
        for warp in np.atleast_1d(warps).tolist():
            waits["wait", warp, instruction] = int(self.current[slot, warp])

    def complete(self, slot: int, key: Hashable) -> None:
        """Ends the current phase of the barrier `key`.  Later signals belong to the next phase."""
        super().complete(slot, key)
        arrivals = self._arrived.pop((slot, key), [])
        released = self._object(slot, key).pending[CONTROL]
        for (kind, warp, instruction), stamp in self._limits.pop((slot, key), {}).items():
            if stamp >= released[warp] and arrivals:
                self._report(kind, slot, key, (warp, stamp, instruction), arrivals[-1])
        self._before[slot, key] = arrivals

    def barrier(self, slots: IndexOrArray, warps: IndexOrArray, key: Hashable = None) -> None:
        """Executes `bar.sync` for `warps` in each CTA of `slots`; `key` is a numbered barrier, for a single CTA."""
        super().barrier(slots, warps, key)
        if key is not None:
            slot = int(np.atleast_1d(slots)[0])
            self._before[slot, key] = self._arrived.pop((slot, key), [])

    def forget(self, slot: int, key: Hashable) -> None:
        """Begins the mbarrier `key` anew, at its init."""
        for events in (self._arrived, self._before, self._limits):
            events.pop((slot, key), None)

    def through_memory(self, slot: int, warps: npt.NDArray[np.integer]) -> None:
        """Records strong or atomic accesses to memory by `warps`: they count as ordered after all earlier ones."""
        if self._arrived or self._before:
            known = self.known[CONTROL, slot]
            self._object(slot, _MEMORY).join_one(CONTROL, slice(None), known[warps].max(axis=0))
            known[warps] = self._object(slot, _MEMORY).pending[CONTROL]
            self._advance(np.asarray(slot), warps)

    def _check_arrival(self, slot: int, key: Hashable, event: _Event, known: npt.NDArray[np.int64], kind: str) -> None:
        unknown = (earlier for earlier in self._before.get((slot, key), ()) if earlier[1] >= known[earlier[0]])
        if (earlier := next(unknown, None)) is not None:
            self._report("numbered" if kind == "numbered" else "arrival", slot, key, earlier, event)

    def _report(self, kind: str, slot: int, key: Hashable, first: _Event, second: _Event) -> None:
        names = self.name_of(first[0]), self.name_of(second[0])
        number: Any = key[-1] if isinstance(key, tuple) else key
        self.findings.add(Race("shared", kind, first[2], second[2], *names, int(number), slot))
