"""Implements asynchronous copies (TMA, bulk copies, `cp.async`), and the waits for them.

A copy is delayed until a thread waits for it.  If the kernel reads the copied data too early, it gets invalid values.
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
_ALL_GROUPS = np.iinfo(np.int64).max
"""A number that is above that of each copy group."""


@dataclass(eq=False)
class Transfer:
    """Describes one unfinished copy."""

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
    """Holds the bulk copy groups of one thread."""

    open: list[Transfer] = field(default_factory=list)
    groups: list[list[Transfer]] = field(default_factory=list)
    read: int = 0
    """The number of groups, from the oldest on, that have read their sources."""


@dataclass(eq=False)
class Copies:
    """Holds the copies of one `cp.async` instruction: its lanes, and the copy group of each lane."""

    lanes: Lanes
    group: Any
    """The number of the copy group: one number for all lanes, or a vector with one number for each lane."""
    run: Callable[[npt.NDArray[np.bool_] | None], None]
    """Carries out the copies of the lanes in a mask; None means all lanes."""
    pending: npt.NDArray[np.bool_] | None = None
    """The lanes whose copies are not yet carried out; None means all lanes."""

    def finish(self, limits: Any) -> bool:
        """Carries out the copies whose groups are below a limit: one number for all lanes, or one for each lane of the
        CTAs.  Returns whether none are left."""
        is_awaited = self.group < (limits if isinstance(limits, int) else limits[self.lanes])
        if self.pending is not None:
            is_awaited = is_awaited & self.pending
        if not np.any(is_awaited):
            return False
        if np.all(is_awaited):
            self.run(None)
            return True
        self.run(is_awaited)
        self.pending = ~is_awaited if self.pending is None else self.pending & ~is_awaited
        return not self.pending.any()


class Transfers:
    """Holds the unfinished copies of the CTAs that run together."""

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
        """Starts a copy.  If `lane` is given, the copy joins the open bulk group of the thread `lane`."""
        if lane is not None:
            transfer.lane = lane
            self._bulk.setdefault(lane, _Bulk()).open.append(transfer)
        (self._loads if transfer.read is None else self._stores)[transfer] = None
        if not self.lazy:
            self._finish(transfer)
        elif self._random is not None and self._random.random() < 0.3:
            self._finish(transfer, only_reads=True)

    def _finish(self, transfer: Transfer, *, only_reads: bool = False) -> None:
        """Performs a bulk copy. With `only_reads`, a copy to global memory only reads its source in shared memory, and
        writes nothing yet."""
        if transfer.read is not None and not transfer.has_read:
            transfer.read()
            transfer.has_read = True
        if transfer.read is not None and only_reads:
            return
        pending_copies = self._loads if transfer.read is None else self._stores
        if transfer in pending_copies:
            del pending_copies[transfer]
            transfer.run()

    def finish_one(self) -> bool:
        """Finishes one copy that signals an mbarrier.  Returns whether there was such a copy."""
        if not self._loads:
            return False
        signalling_copies = list(self._loads)
        copy_index = self._random.randrange(len(signalling_copies)) if self._random is not None else 0
        self._finish(signalling_copies[copy_index])
        return True

    def commit_bulk(self, lanes: Lanes) -> None:
        """Runs `cp.async.bulk.commit_group` for the threads `lanes`.  Does nothing for threads without copies."""
        for lane, bulk_groups in self._bulk.items():
            if lane in lanes:
                bulk_groups.groups.append(bulk_groups.open)
                bulk_groups.open = []

    def wait_bulk(self, lanes: Lanes, newest: int, *, only_reads: bool) -> list[Transfer]:
        """Runs `cp.async.bulk.wait_group` for the threads `lanes`.  `newest` is the number of newest groups that may
        stay unfinished.  All older groups of copies are finished.

        Returns the finished copies.  With `only_reads`, the copies read their sources, but write nothing yet."""
        finished_copies: list[Transfer] = []
        for lane, bulk in self._bulk.items():
            if lane in lanes:
                done_count = max(0, len(bulk.groups) - newest)
                for group_transfers in bulk.groups[bulk.read if only_reads else 0 : done_count]:
                    finished_copies += group_transfers
                if only_reads:
                    bulk.read = max(bulk.read, done_count)
                else:
                    bulk.groups, bulk.read = bulk.groups[done_count:], max(0, bulk.read - done_count)
        for bulk_transfer in finished_copies:
            self._finish(bulk_transfer, only_reads=only_reads)
        return finished_copies

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
        """Runs `cp.async.wait_group`.  If `newest` is None, waits for all copies."""
        if not self._copies:
            return
        limits = self._committed[context.lanes] - newest if newest is not None else np.full(context.size, _ALL_GROUPS)
        has_all_threads = context.size == int(np.count_nonzero(self._group.alive))
        if has_all_threads and (limits == limits[0]).all():
            self._finish_below(int(limits[0]))
        else:
            self._finish_below(self._limits(context.lanes, limits))

    def _finish_below(self, limits: Any) -> None:
        self._copies = [copies for copies in self._copies if not copies.finish(limits)]

    def _limits(self, lanes: Lanes, limits: Any) -> Lanes:
        """Returns for each lane the number below which its copy groups must finish: `limits`, and -1 for others than
        `lanes`."""
        lane_limits = np.full(len(self._group.alive), -1, np.int64)
        lane_limits[lanes] = limits
        return lane_limits

    def finish_copies(self, lanes: Lanes) -> None:
        """Finishes all `cp.async` copies of `lanes`."""
        self._finish_below(self._limits(lanes, _ALL_GROUPS))

    def drain(self) -> None:
        """Finishes all copies when the CTAs end.  Raises `Fault` if a copy may still read the CTAs' shared memory."""
        for bulk_transfer in (*self._loads, *self._stores):
            if bulk_transfer.read is not None and not bulk_transfer.has_read:
                text = "the CTA ended while this copy may still read its shared memory"
                raise Fault(text, bulk_transfer.instruction, rule="early-exit")
        self.finish()

    def finish(self) -> None:
        """Finishes all copies."""
        for bulk_transfer in (*self._loads, *self._stores):
            self._finish(bulk_transfer)
        self._finish_below(_ALL_GROUPS)
