"""What contexts wait for: CTA barriers, mbarriers, and transfers that are in flight (PTX ISA 8.7, section 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

from rooflab.bench.ptx.machine.barriers import Barriers
from rooflab.bench.ptx.machine.clusters import ClusterBarrier, Registers
from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.group import Group
from rooflab.bench.ptx.machine.mbarriers import MBarriers, Wait
from rooflab.bench.ptx.machine.transfers import Transfers

Resume = Callable[[list[Context]], None]


class Waiting:
    """Everything of one group that may hold a context back."""

    def __init__(self, group: Group, resume: Resume):
        self._resume = resume
        self.barriers = Barriers(group, resume)
        self.mbarriers = MBarriers(group)
        self.transfers = Transfers(group)
        self.clusters = ClusterBarrier(group, resume)
        self.registers = Registers(group)
        self._at_mbarriers: list[tuple[Context, list[Wait]]] = []

    def any(self) -> bool:
        """Whether somebody waits."""
        return bool(self._at_mbarriers) or self.barriers.any() or self.clusters.any()

    def park_at_mbarriers(self, context: Context, waits: list[Wait]) -> None:
        """`context` asks again once one of the phases is over."""
        self._at_mbarriers.append((context, waits))

    def wake_mbarriers(self) -> bool:
        """Lets those go on for whom a phase is complete; whether there were any."""
        went = [item for item in self._at_mbarriers if self.mbarriers.any_complete(item[1])]
        if went:
            self._at_mbarriers = [item for item in self._at_mbarriers if item not in went]
            self._resume([context for context, _ in went])
        return bool(went)

    def advance(self) -> bool:
        """Lets a transfer finish when nobody can go on; whether somebody can now, or another transfer may help."""
        if self.wake_mbarriers():
            return True
        while self.transfers.finish_one():
            if self.wake_mbarriers():
                return True
        return self.barriers.recheck() or self.clusters.recheck()

    def ended(self) -> None:
        """Threads have ended: barriers of all threads no longer count them."""
        self.barriers.recheck()
        self.clusters.recheck()

    def describe(self) -> list[tuple[Context, str, int]]:
        """Who waits, for what, and at which instruction."""
        found = [
            (context, f"for {self.mbarriers.describe(waits)}", context.place) for context, waits in self._at_mbarriers
        ]
        # At the other barriers a context's place is already the one behind them.
        others = self.barriers.describe() + self.clusters.describe()
        return found + [(context, text, context.place - 1) for context, text in others]
