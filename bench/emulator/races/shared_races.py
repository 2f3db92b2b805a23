"""Finds races on shared memory with vector clocks, in whatever order the emulator runs the warps.

Order is tracked per warp: if half of a warp reaches a barrier, the whole warp counts as arrived, except for the stores
of lanes that nothing orders before a release (`LaneStores`).  Lanes of one warp race with each other only if one
instruction writes different values to one address.

If two warps write one address, only the values of their last lanes are compared.  The reason: since Triton 3.8, all
warps that hold a row store the row's sum to one address.  A fused multiply-add rounds this sum differently in each
lane.

A slot is the shared memory of a CTA or a cluster.  Slot `s` begins at address `s * size`, with `size` in bytes.  An
access has `width` bytes, and its address must be a multiple of `width`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rooflab.bench.emulator.races.lane_stores import StoreMarks
from rooflab.bench.emulator.races.phases import BarrierPhases
from rooflab.bench.emulator.races.reports import Race
from rooflab.bench.emulator.races.shadow_memory import (
    BLOCK_SHIFT,
    GRANULE_SIZES,
    Bools,
    Ints,
    Lanes,
    Late,
    Operation,
    Shadow,
    Values,
    chosen,
    collisions,
    equal,
    replaced,
)
from rooflab.bench.emulator.races.vector_clocks import ACTOR_BITS, ACTOR_MASK, GENERIC, INIT, LOWER_MASK, AsyncOperation

MBARRIER_BYTES = 8


class SharedRaces(BarrierPhases):
    """Detects races on the shared memory of CTAs or of one cluster.

    A slot is a CTA, or a whole cluster.  For a cluster, `slots` is 1, and `ctas` has the numbers of its CTAs.  Each
    slot has `warps` warps and `size` bytes.  It tracks `async_slots` TMA loads separately.  `granule_bytes` is the
    width of the narrowest access.  At most `limit` races are stored.

    Raises `ValueError` if `size` is not a multiple of 1024, or `granule_bytes` is not 1, 2, 4, 8 or 16.  Also raises it
    if `4 * warps + async_slots` is above 4096.
    """

    def __init__(
        self,
        slots: int,
        warps: int,
        size: int,
        granule_bytes: int = 4,
        async_slots: int = 64,
        limit: int = 100,
        ctas: Sequence[int] = (),
    ) -> None:
        super().__init__(slots, warps, async_slots, ctas, limit)
        if size <= 0 or size % 1024:
            raise ValueError(f"size: expected a positive multiple of 1024 bytes, got {size}")
        if granule_bytes not in GRANULE_SIZES:
            raise ValueError(f"granule_bytes: expected 1, 2, 4, 8 or 16, got {granule_bytes}")
        self.size = size
        self._shadow = Shadow(slots * size, granule_bytes.bit_length() - 1, self.readers, warps)
        self._inits: set[int] = set()
        """The instructions that made or ended an mbarrier."""

    @property
    def found(self) -> list[Race]:
        """Returns the races that the detector found so far."""
        return self.findings.races

    def read(
        self, slots: Ints | int, warps: Ints, addresses: Ints, width: int, instruction: int, of_mbarrier: bool = False
    ) -> None:
        """Records reads of n lanes.  `warps` is (n,); `slots` and `addresses` are (n,), or one value for all lanes."""
        lane_access = Lanes(self, self._shadow, slots, warps, addresses, width, instruction)
        planes = (GENERIC, INIT) if of_mbarrier else (GENERIC,)  # a fence.mbarrier_init is enough to order an init
        self._meet(lane_access, lane_access.late_writes(*planes), "write-read", instruction)
        self._meet(lane_access, lane_access.late(self._shadow.atomics, self.warps), "write-read", instruction)
        self._shadow.reads.record(lane_access.actors, lane_access.cells, lane_access.stamps)

    def write(
        self,
        slots: Ints | int,
        warps: Ints,
        addresses: Ints,
        width: int,
        instruction: int,
        values: Values | None = None,
        old: Callable[[], Values] | None = None,
    ) -> StoreMarks:
        """Records that n lanes write `width` bytes each, at `addresses`.  `warps` `[n]` gives each lane's warp, and
        `slots` its CTA or cluster.  `slots` and `addresses` are `[n]`, or one value for all lanes.  Returns the stores'
        marks for `LaneStores`.

        `values` are the stored registers.  `old()` returns the memory's earlier values, and is called only at a race.
        If both are given, a race's field `same_value` tells whether the write left the memory unchanged."""
        lane_access = Lanes(self, self._shadow, slots, warps, addresses, width, instruction)
        self._meet_all(lane_access, instruction, values, old)
        self._shadow.writes[lane_access.cells.granules] = lane_access.stamps[:, None]
        if warps.size > 1:
            self._collide(lane_access, instruction, values)
        return StoreMarks(self._shadow.writes, lane_access.cells.granules, lane_access.stamps)

    def atomic(self, slots: Ints | int, warps: Ints, addresses: Ints, width: int, instruction: int) -> None:
        """Records an atomic operation of lanes.  It races with reads and writes, but not with other atomics.

        This call records no order.  If the atomics form a lock, callers also call `signal`, `complete` and `wait`."""
        lane_access = Lanes(self, self._shadow, slots, warps, addresses, width, instruction)
        self._meet(lane_access, lane_access.late_writes(), "write-write", instruction)
        self._meet(lane_access, lane_access.late(self._shadow.reads, self.readers), "read-write", instruction)
        self._shadow.all_atomics().record(lane_access.actors, lane_access.cells, lane_access.stamps)

    def copy_async(self, slots: Ints | int, warps: Ints, addresses: Ints, width: int, instruction: int) -> None:
        """Records cp.async copies of lanes to `addresses`.  Only `wait_copies` orders them before later accesses."""
        lane_access = Lanes(self, self._shadow, slots, warps, addresses, width, instruction, copies=True)
        self._meet_all(lane_access, instruction)
        self._shadow.writes[lane_access.cells.granules] = lane_access.stamps[:, None]
        self.latest.reshape(-1)[slots * self.actors + lane_access.actors] = lane_access.stamps
        self._collide(lane_access, instruction, None)

    def async_read(self, transfer: AsyncOperation, addresses: Ints, width: int, instruction: int) -> None:
        """Records that a wgmma or a bulk store reads `width` bytes at each of `addresses` `[n]`, through the async
        proxy.

        The call is fastest with a `width` of 1024 bytes."""
        op_access = Operation(self._shadow, transfer, addresses, width, instruction)
        self._meet(op_access, op_access.late_writes(), "write-read", instruction)
        self._meet(op_access, op_access.late(self._shadow.atomics, self.warps), "write-read", instruction)
        self._shadow.reads.record_one(transfer.actor, op_access.cells, op_access.stamp)
        self.latest[transfer.slot, transfer.actor] = op_access.stamp

    def async_write(self, transfer: AsyncOperation, addresses: Ints, width: int, instruction: int) -> None:
        """Records that a TMA load (kind `TMA_LOAD`) writes `width` bytes at each of `addresses` `[n]`.

        If the load overwrites an earlier write, a proxy fence must come between them.  For an earlier read, ordinary
        order is enough; CUTLASS relies on this.  Ordinary order is also enough for an earlier mbarrier init, because
        Triton 3.7 lets loads overwrite unused mbarriers without a proxy fence."""
        op_access = Operation(self._shadow, transfer, addresses, width, instruction)
        self._meet(op_access, op_access.late_writes(), "write-write", instruction)
        self._meet(op_access, op_access.late(self._shadow.reads, self.readers, GENERIC), "read-write", instruction)
        self._meet(op_access, op_access.late(self._shadow.atomics, self.warps), "write-write", instruction)
        self._shadow.writes[op_access.cells.granules] = op_access.stamp
        self.latest[transfer.slot, transfer.actor] = op_access.stamp

    def end(self, slot: int) -> None:
        """Ends the CTA in `slot`.  Reports asynchronous operations that no warp waited for: they may run on while the
        next CTA already uses the memory."""
        for last_stamp in self.never_awaited(slot):
            self._ended(last_stamp, slot * self.size >> self._shadow.shift)

    def _ended(self, stamp: int, granule: int) -> None:
        """Reports that a CTA ended while the access `stamp` may still use its shared memory."""
        instruction, actor = (stamp & LOWER_MASK) >> ACTOR_BITS, stamp & ACTOR_MASK
        self._add("end", instruction, instruction, (actor, actor), granule)

    def leave(self, cta: int) -> None:
        """Ends the CTA with this index in the cluster.  Reports what warps of other CTAs do to its shared memory, if
        none of its warps has waited for that: in another run the CTA may be gone by then."""
        warps, size = self.warps // len(self._ctas), self.size // len(self._ctas)
        known = self.known[:, 0, cta * warps : (cta + 1) * warps].max(axis=1)
        actors = np.arange(self.actors)
        known[:, (actors >= self.copies + self.warps) | (actors % self.warps // warps == cta)] = np.iinfo(np.int64).max
        blocks = np.arange(cta * size, (cta + 1) * size, 1 << BLOCK_SHIFT)
        ended = Operation(self._shadow, AsyncOperation(0, 0, 0, known), blocks, 1 << BLOCK_SHIFT, 0)
        tables = ((self._shadow.reads, self.readers), (self._shadow.atomics, self.warps))
        for late in (ended.late_writes(GENERIC), *(ended.late(table, n, GENERIC) for table, n in tables)):
            if late is not None:
                for stamp, index in zip(*np.unique(late.stamps, return_index=True), strict=True):
                    self._ended(int(stamp), int(late.granules[index]))

    def mbarrier_init(self, slot: int, warp: int, address: int, instruction: int) -> None:
        """Records mbarrier.init: a write of 8 bytes that must be ordered after all earlier uses of these bytes."""
        self._inits.add(instruction)
        self.forget(slot, address)
        self.write(slot, np.array([warp]), np.array([address]), MBARRIER_BYTES, instruction)

    def mbarrier_use(self, slot: int, warps: Ints, address: int, instruction: int) -> None:
        """Records an arrive, expect_tx or wait by `warps` (n,).  Only the mbarrier's init must be ordered before it."""
        self.read(slot, warps, np.array(address), MBARRIER_BYTES, instruction, of_mbarrier=True)

    def mbarrier_use_async(
        self, transfer: AsyncOperation, address: int, instruction: int, needs_fence: bool = True
    ) -> None:
        """Records complete_tx: an asynchronous transfer arrives at an mbarrier.

        The mbarrier's init must be ordered before the transfer's issue.  If `needs_fence` is true, this order needs a
        `fence_mbarrier_init` or a `fence_proxy_async`.  Callers pass false for a CTA's own mbarrier, because Triton 3.7
        emits no such fence for it."""
        op_access = Operation(self._shadow, transfer, np.array([address]), MBARRIER_BYTES, instruction)
        self._meet(op_access, op_access.late_writes(INIT if needs_fence else GENERIC), "write-read", instruction)

    def mbarrier_inval(self, slot: int, warp: int, address: int, instruction: int) -> None:
        """Records mbarrier.inval: a write that must follow all uses of the mbarrier and all its TMA loads.

        These loads are known only if `signal_async` was called with the mbarrier's byte address as `key`."""
        self.mbarrier_init(slot, warp, address, instruction)
        for load_actor in self.unwaited(slot, warp, address):
            self._add("read-write", instruction, instruction, (load_actor, warp), address >> self._shadow.shift)

    def _meet_all(
        self, access: Lanes, instruction: int, values: Values | None = None, old: Callable[[], Values] | None = None
    ) -> None:
        for race_kind, racing_accesses in (
            ("write-write", access.late_writes()),
            ("read-write", access.late(self._shadow.reads, self.readers)),
            ("write-write", access.late(self._shadow.atomics, self.warps)),
        ):
            if racing_accesses is not None:
                is_unchanged = None
                if values is not None and old is not None:
                    is_unchanged = equal(chosen(values, access.last_of_warp()), old(), access.actors.size)
                self._meet(access, racing_accesses, race_kind, instruction, is_unchanged)

    def _meet(
        self, access: Lanes | Operation, late: Late | None, kind: str, instruction: int, same: Bools | None = None
    ) -> None:
        """Reports a race for each earlier access in `late` that is not ordered before this access. `same` tells, for
        each lane, whether the access leaves the memory unchanged."""
        if late is None:
            return
        actors, is_ordered = access.actors_of(late), access.but_for_proxy(late)
        is_value_kept = np.zeros(late.stamps.size, np.bool_) if same is None else same[late.access]
        race_keys = (late.stamps & LOWER_MASK) * 4 + is_ordered * 2 + is_value_kept
        for first_index, n_races in zip(*np.unique(race_keys, return_index=True, return_counts=True)[1:], strict=True):
            first_stamp = int(late.stamps[first_index])
            first_instruction = (first_stamp & LOWER_MASK) >> ACTOR_BITS
            if kind == "write-write" and is_ordered[first_index] and first_instruction in self._inits:
                continue
            pair = first_stamp & ACTOR_MASK, int(actors[first_index])
            more = bool(is_ordered[first_index]), bool(is_value_kept[first_index]), int(n_races)
            self._add(kind, first_instruction, instruction, pair, int(late.granules[first_index]), *more)

    def _add(self, kind: str, first: int, second: int, actors: tuple[int, int], granule: int, *more: Any) -> None:
        """Reports a race of two instructions at a granule.  `more` are the last fields of a `Race`."""
        slot, address = divmod(granule << self._shadow.shift, self.size)
        names = self.name_of(actors[0]), self.name_of(actors[1])
        self.findings.add(Race("shared", kind, first, second, *names, address, slot, *more))

    def _collide(self, access: Lanes, instruction: int, values: Values | None) -> None:
        """Reports lanes that write one address in the same instruction. Two warps always collide. Lanes of one warp
        collide if their values differ."""
        # All lanes have one width and aligned addresses.  So two accesses overlap completely or not at all.
        if (overwritten := replaced(self._shadow.winners, access.cells.granules[:, 0])) is None:
            return
        losers, winners = overwritten
        last_lanes = access.last_of_warp()[losers]
        is_cross_warp = last_lanes == losers
        winners = np.where(is_cross_warp, winners, last_lanes)
        for race_kind, is_value_kept, index, count in collisions(values, losers, winners, is_cross_warp):
            pair = int(access.actors[losers[index]]), int(access.actors[winners[index]])
            granule = int(access.cells.granules[losers[index], 0])
            self._add(race_kind, instruction, instruction, pair, granule, False, is_value_kept, count)
