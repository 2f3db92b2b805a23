"""Holds the barriers, mbarriers and transfers that threads may wait for (PTX ISA 8.7, section 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

from rooflab.bench.emulator.machine.barriers import Barriers, ClusterBarrier, Registers
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.mbarriers import MBarriers, Wait
from rooflab.bench.emulator.machine.run import CtaGroup
from rooflab.bench.emulator.machine.transfers import Transfers

Resume = Callable[[list[LaneContext]], None]


def waiting_of(group: CtaGroup) -> Waiting:
    """Returns the barriers and transfers of a group of CTAs."""
    wait_state: Waiting = group.waiting
    return wait_state


class Waiting:
    """Holds the barriers, mbarriers and transfers of the CTAs that run together."""

    def __init__(self, group: CtaGroup, resume: Resume):
        self._resume = resume
        self.barriers = Barriers(group, resume)
        self.mbarriers = MBarriers(group)
        self.transfers = Transfers(group)
        self.clusters = ClusterBarrier(group, resume)
        self.registers = Registers(group)
        self._at_mbarriers: list[tuple[LaneContext, list[Wait]]] = []

    def any(self) -> bool:
        """Returns whether any lanes wait."""
        return bool(self._at_mbarriers) or self.barriers.any() or self.clusters.any()

    def park_at_mbarriers(self, context: LaneContext, waits: list[Wait]) -> None:
        """Stops the lanes of `context` until an mbarrier phase in `waits` is over.  Then they check again."""
        self._at_mbarriers.append((context, waits))

    def wake_mbarriers(self) -> bool:
        """Resumes lanes if a phase that they wait for is over.  Returns whether it resumed any lanes."""
        resumed_items = [wait_item for wait_item in self._at_mbarriers if self.mbarriers.any_complete(wait_item[1])]
        if resumed_items:
            self._at_mbarriers = [wait_item for wait_item in self._at_mbarriers if wait_item not in resumed_items]
            self._resume([context for context, _ in resumed_items])
        return bool(resumed_items)

    def advance(self) -> bool:
        """Finishes copies until some lanes can continue.  Returns whether any lanes can continue."""
        if self.wake_mbarriers():
            return True
        while self.transfers.finish_one():
            if self.wake_mbarriers():
                return True
        return self.barriers.recheck() or self.clusters.recheck()

    def ended(self) -> None:
        """Checks the barriers again after threads have ended: a barrier of all threads no longer needs them."""
        self.barriers.recheck()
        self.clusters.recheck()

    def describe(self) -> list[tuple[LaneContext, str, int]]:
        """Lists the waiting groups of lanes as triples `(context, reason_text, instruction_number)`."""
        mbarrier_entries = [
            (context, f"for {self.mbarriers.describe(phases)}", context.place) for context, phases in self._at_mbarriers
        ]
        # At these barriers a context's place is already the next instruction.
        barrier_entries = self.barriers.describe() + self.clusters.describe()
        return mbarrier_entries + [(context, wait_text, context.place - 1) for context, wait_text in barrier_entries]
