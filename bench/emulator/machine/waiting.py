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
    waiting: Waiting = group.waiting
    return waiting


class Waiting:
    """Holds the barriers, mbarriers and transfers of the CTAs that run at once."""

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
        """Stops `context` until one of its awaited phases is over.  Then the context checks the phases again."""
        self._at_mbarriers.append((context, waits))

    def wake_mbarriers(self) -> bool:
        """Resumes contexts with a completed phase.  Returns whether it resumed any context."""
        went = [item for item in self._at_mbarriers if self.mbarriers.any_complete(item[1])]
        if went:
            self._at_mbarriers = [item for item in self._at_mbarriers if item not in went]
            self._resume([context for context, _ in went])
        return bool(went)

    def advance(self) -> bool:
        """Finishes transfers until a context can continue.  Returns whether a context can continue."""
        if self.wake_mbarriers():
            return True
        while self.transfers.finish_one():
            if self.wake_mbarriers():
                return True
        return self.barriers.recheck() or self.clusters.recheck()

    def ended(self) -> None:
        """Checks the barriers again after threads have ended: a barrier for all threads no longer waits for them."""
        self.barriers.recheck()
        self.clusters.recheck()

    def describe(self) -> list[tuple[LaneContext, str, int]]:
        """Lists all waiting contexts, each with the reason of the wait in words and the waiting instruction."""
        at_mbarriers = [
            (context, f"for {self.mbarriers.describe(waits)}", context.place) for context, waits in self._at_mbarriers
        ]
        # At these barriers a context's place is already the next instruction.
        at_barriers = self.barriers.describe() + self.clusters.describe()
        return at_mbarriers + [(context, text, context.place - 1) for context, text in at_barriers]
