"""Everything that lane contexts wait for: barriers, mbarriers and transfers (PTX ISA 8.7, section 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

from rooflab.bench.emulator.machine.barriers import Barriers, ClusterBarrier, Registers
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.mbarriers import MBarriers, Wait
from rooflab.bench.emulator.machine.run import CtaGroup
from rooflab.bench.emulator.machine.transfers import Transfers

Resume = Callable[[list[LaneContext]], None]


def waiting_of(group: CtaGroup) -> Waiting:
    """The barriers and transfers of a group of CTAs."""
    waiting: Waiting = group.waiting
    return waiting


class Waiting:
    """The barriers, mbarriers and transfers of one group of CTAs, for which lane contexts may wait."""

    def __init__(self, group: CtaGroup, resume: Resume):
        self._resume = resume
        self.barriers = Barriers(group, resume)
        self.mbarriers = MBarriers(group)
        self.transfers = Transfers(group)
        self.clusters = ClusterBarrier(group, resume)
        self.registers = Registers(group)
        self._at_mbarriers: list[tuple[LaneContext, list[Wait]]] = []

    def any(self) -> bool:
        """Whether any lane context waits."""
        return bool(self._at_mbarriers) or self.barriers.any() or self.clusters.any()

    def park_at_mbarriers(self, context: LaneContext, waits: list[Wait]) -> None:
        """Keeps `context` until one of the awaited phases is over; then the context checks again."""
        self._at_mbarriers.append((context, waits))

    def wake_mbarriers(self) -> bool:
        """Resumes contexts whose awaited phase is complete; returns whether it resumed any context."""
        went = [item for item in self._at_mbarriers if self.mbarriers.any_complete(item[1])]
        if went:
            self._at_mbarriers = [item for item in self._at_mbarriers if item not in went]
            self._resume([context for context, _ in went])
        return bool(went)

    def advance(self) -> bool:
        """Finishes transfers until a context can go on; returns whether a context can go on."""
        if self.wake_mbarriers():
            return True
        while self.transfers.finish_one():
            if self.wake_mbarriers():
                return True
        return self.barriers.recheck() or self.clusters.recheck()

    def ended(self) -> None:
        """Checks the barriers for all threads again after threads have ended: barriers no longer wait for these."""
        self.barriers.recheck()
        self.clusters.recheck()

    def describe(self) -> list[tuple[LaneContext, str, int]]:
        """Lists each waiting context, the reason of the wait in words, and the instruction that waits."""
        at_mbarriers = [
            (context, f"for {self.mbarriers.describe(waits)}", context.place) for context, waits in self._at_mbarriers
        ]
        # At these barriers a context's place is already the next instruction.
        others = self.barriers.describe() + self.clusters.describe()
        return at_mbarriers + [(context, text, context.place - 1) for context, text in others]
