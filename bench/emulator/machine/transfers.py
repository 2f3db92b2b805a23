"""Copies that run beside the threads (TMA, bulk copies, `cp.async`), and how threads wait for their copies.

A copy is delayed until a thread waits for it: an instruction that reads its destination too early finds poison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.run import CtaGroup, Fault

Lanes = npt.NDArray[np.int64]


@dataclass(eq=False)
class Transfer:
    """One copy in flight."""

    run: Callable[[], None]
    """Carries the copy out, and signals the copy's mbarrier, if there is one."""
    instruction: int
    read: Callable[[], object] | None = None
    """Reads the copy's source out of shared memory; `run` then only writes.  None if `run` also reads."""
    has_read: bool = False
    mark: Any = None
    """The race detector's record of the copy."""
    lane: int = 0
    """The lane that issued the copy."""


@dataclass
class _Bulk:
    """The bulk groups of one thread."""

    open: list[Transfer] = field(default_factory=list)
    groups: list[list[Transfer]] = field(default_factory=list)
    read: int = 0
    """The number of groups, from the oldest on, that have read their sources."""


@dataclass(eq=False)
class Copies:
    """The copies of one `cp.async` instruction: its lanes, and the copy group of each lane."""

    lanes: Lanes
    group: Any
    """The number of the copy group: one number for all lanes, or a vector with one number for each lane."""
    run: Callable[[npt.NDArray[np.bool_] | None], None]
    """Carries out the copies of the lanes in a mask; None means all lanes."""


class Transfers:
    """The copies in flight of one group of CTAs."""

    def __init__(self, group: CtaGroup):
        self._group = group
        self.lazy = group.run.checks.asynchronous
        self._loads: dict[Transfer, None] = {}
        """Copies that signal an mbarrier, in the order of issue."""
        self._stores: dict[Transfer, None] = {}
        """Copies that write global memory.  They run only when a thread waits: no code may rely on them earlier."""
        self._bulk: dict[int, _Bulk] = {}
        self._copies: list[Copies] = []
        self._committed = np.zeros(len(group.alive), np.int64)
        self._random = group.run.random

    # Copies that tell an mbarrier, or belong to a bulk group

    def start(self, transfer: Transfer, lane: int | None = None) -> None:
        """Starts a copy; if `lane` is given, the copy joins the open bulk group of this thread."""
        if lane is not None:
            transfer.lane = lane
            self._bulk.setdefault(lane, _Bulk()).open.append(transfer)
        (self._loads if transfer.read is None else self._stores)[transfer] = None
        if not self.lazy:
            self._finish(transfer)
        elif self._random is not None and self._random.random() < 0.3:
            self._finish(transfer, only_reads=True)

    def _finish(self, transfer: Transfer, *, only_reads: bool = False) -> None:
        """Carries a copy out; with `only_reads`, only reads the copy's source out of shared memory."""
        if transfer.read is not None and not transfer.has_read:
            transfer.read()
            transfer.has_read = True
        if transfer.read is not None and only_reads:
            return
        going = self._loads if transfer.read is None else self._stores
        if transfer in going:
            del going[transfer]
            transfer.run()

    def finish_one(self) -> bool:
        """Finishes one copy that signals an mbarrier; returns whether there was a copy."""
        if not self._loads:
            return False
        helpful = list(self._loads)
        place = self._random.randrange(len(helpful)) if self._random is not None else 0
        self._finish(helpful[place])
        return True

    def commit_bulk(self, lanes: Lanes) -> None:
        """Runs `cp.async.bulk.commit_group` for these threads.  Nothing happens for threads without copies."""
        for lane, bulk in self._bulk.items():
            if lane in lanes:
                bulk.groups.append(bulk.open)
                bulk.open = []

    def wait_bulk(self, lanes: Lanes, newest: int, *, only_reads: bool) -> list[Transfer]:
        """Runs `cp.async.bulk.wait_group` of these threads: finishes all but the last `newest` groups.

        Returns the finished copies.  With `only_reads`, the copies only read their sources.
        """
        done: list[Transfer] = []
        for lane, bulk in self._bulk.items():
            if lane in lanes:
                keep = max(0, len(bulk.groups) - newest)
                for transfers in bulk.groups[bulk.read if only_reads else 0 : keep]:
                    done += transfers
                if only_reads:
                    bulk.read = max(bulk.read, keep)
                else:
                    bulk.groups, bulk.read = bulk.groups[keep:], max(0, bulk.read - keep)
        for transfer in done:
            self._finish(transfer, only_reads=only_reads)
        return done

    # `cp.async`

    def copy(self, copies: Copies) -> None:
        """Starts the copies of one `cp.async`."""
        groups = self._committed[copies.lanes]
        copies.group = int(groups[0]) if (groups == groups[0]).all() else groups
        if self.lazy:
            self._copies.append(copies)
        else:
            copies.run(None)

    def commit(self, context: LaneContext) -> None:
        """Runs `cp.async.commit_group`."""
        self._committed[context.lanes] += 1

    def wait(self, context: LaneContext, newest: int | None) -> None:
        """Runs `cp.async.wait_group`; None waits for all copies."""
        if not self._copies:
            return
        limit = self._committed[context.lanes] - newest if newest is not None else None
        uniform = limit is None or bool((limit == limit[0]).all())
        whole = context.size == int(np.count_nonzero(self._group.alive))
        left: list[Copies] = []
        for copies in self._copies:
            if whole and uniform and isinstance(copies.group, int):
                if limit is None or copies.group < int(limit[0]):
                    copies.run(None)
                else:
                    left.append(copies)
                continue
            left += self._wait_some(copies, self._limits(context.lanes, limit))
        self._copies = left

    def _limits(self, lanes: Lanes, limit: Lanes | None) -> Lanes:
        """For each lane, the number below which its copy groups must finish: `limit` for `lanes`; None: all groups."""
        limits = np.full(len(self._group.alive), -1, np.int64)
        limits[lanes] = np.iinfo(np.int64).max if limit is None else limit
        return limits

    @staticmethod
    def _wait_some(copies: Copies, limits: Lanes) -> list[Copies]:
        due = limits[copies.lanes] > copies.group
        if not due.any():
            return [copies]
        if due.all():
            copies.run(None)
            return []
        copies.run(due)
        rest = ~due

        def run_rest(mask: npt.NDArray[np.bool_] | None) -> None:
            whole = rest.copy()
            if mask is not None:
                whole[rest] = mask
            copies.run(whole)

        group = copies.group if isinstance(copies.group, int) else copies.group[rest]
        return [Copies(copies.lanes[rest], group, run_rest)]

    def finish_copies(self, lanes: Lanes) -> None:
        """Finishes all copies of these lanes."""
        limits = self._limits(lanes, None)
        self._copies = [rest for copies in self._copies for rest in self._wait_some(copies, limits)]

    def drain(self) -> None:
        """Finishes all copies when the CTAs end.  Raises `Fault` if a copy may still read the CTAs' shared memory."""
        for transfer in (*self._loads, *self._stores):
            if transfer.read is not None and not transfer.has_read:
                raise Fault("the CTA ended while this copy may still read its shared memory", transfer.instruction)
            self._finish(transfer)
        for copies in self._copies:
            copies.run(None)
        self._copies = []
