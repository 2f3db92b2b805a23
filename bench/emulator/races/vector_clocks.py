"""Tracks the order of memory accesses by warps and asynchronous operations, with vector clocks (FastTrack, Flanagan and
Freund, 2009).

An actor is a warp or a stream of asynchronous operations, and has a clock.  An actor knows an access if the access is
ordered before everything that the actor does next.  Four kinds of order (planes) are kept apart:

- GENERIC is plain happens-before.
- ASYNC is the order before operations of the async proxy (TMA, wgmma).  A fence.proxy.async copies GENERIC into ASYNC
  (PTX ISA 8.7, sections "Proxies" and "membar/fence").
- INIT is the order of mbarrier inits before uses of the mbarriers.  A fence.mbarrier_init is enough for it.
- CONTROL is the order of the barriers' events: a relaxed arrival, or a copy's end, orders these but no accesses.

A stamp is an int64 that identifies an access.  The clock is in the upper 32 bits, the instruction in bits 12 to 31, the
actor in the lower 12.  An actor's stamps grow with time.  Each warp stores one stamp for each actor.  The warp knows
all accesses of this actor with smaller stamps.

A slot is a CTA, or a cluster with CTAs that access each other's memory.  A slot with W warps has these actors:

- W warps;
- W wgmma streams and W bulk streams for reads, which complete in order;
- W cp.async streams for writes, also in order;
- a pool of actors for TMA loads, which complete in any order: each load takes the next actor of the pool.

If the pool is too small, two loads share an actor.  A wait for the later load then counts for both.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

CLOCK_STEP = 1 << 32
"""One tick of a clock."""
LOWER_MASK = CLOCK_STEP - 1
ACTOR_BITS = 12
MAX_ACTORS = 1 << ACTOR_BITS
"""The most actors of a slot.  A cluster of 16 CTAs of 32 warps has 3072, with 64 actors per CTA for TMA loads."""
ACTOR_MASK = MAX_ACTORS - 1
"""The mask of the bits of a stamp that hold the actor."""
GENERIC, ASYNC, INIT, CONTROL = 0, 1, 2, 3
"""The numbers of the three planes of order."""
WGMMA, BULK, COPY = "wgmma", "bulk", "cp.async"
TMA_LOAD = "load"
_STREAM_KINDS = (WGMMA, BULK, COPY)

IndexOrArray = int | npt.NDArray[np.integer]
"""One slot or warp, or an array of slots or warps without repetition."""
Stamps = npt.NDArray[np.int64]
_Stamp = TypeVar("_Stamp", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class AsyncOperation:
    """Describes one asynchronous operation: the stream that runs it, its time on the stream's clock, and the accesses
    that are ordered before it."""

    slot: int
    actor: int
    stamp: int
    """The clock and the actor; each access adds its instruction's number."""
    known: Stamps
    """By plane, what is known to be ordered before the operation: (4, actors)."""


class VectorClocks:
    """Stores the vector clocks of several CTAs.  A slot is one CTA.  With the list `ctas`, there is one slot, which is
    the cluster of these CTAs.

    An actor is a warp or a stream of asynchronous operations, and each actor has a clock.  Each slot has `warps` warps;
    for a cluster, this counts the warps of all CTAs.  Each slot also has `pool` streams for TMA loads.  Raises
    `ValueError` if a slot would have more than 4096 actors."""

    def __init__(self, slots: int, warps: int, pool: int = 64, ctas: Sequence[int] = ()) -> None:
        self.slots, self.warps = slots, warps
        self._ctas = ctas
        self.actors = warps * (1 + len(_STREAM_KINDS)) + pool
        if min(slots, warps, pool) < 1 or self.actors > MAX_ACTORS:
            raise ValueError(
                f"slots, warps, pool: expected at least 1 each and 4 * warps + pool <= {MAX_ACTORS}, "
                f"got {slots}, {warps}, {pool}"
            )
        self.readers = 3 * warps
        """The actors below this number can read: warps, wgmma streams and bulk streams."""
        self.copies = warps * (1 + _STREAM_KINDS.index(COPY))
        """The first actor of the cp.async streams; they follow in the order of the warps."""
        self._pool = self.copies + warps
        self.known = np.full((4, slots, warps, self.actors), CLOCK_STEP, np.int64)
        """By plane, slot, warp, and actor: the least stamp of the actor that the warp does not know."""
        self.current = np.full((slots, self.actors), CLOCK_STEP, np.int64) + np.arange(self.actors)
        """By slot and actor: the stamp, without an instruction, of the actor's current accesses."""
        self.latest = np.zeros((slots, self.actors), np.int64)
        """By slot and actor: the stamp of an asynchronous actor's last access."""
        self._now: Stamps | None = None
        self._next = [0] * slots
        self._objects: list[dict[Hashable, _SyncObject]] = [{} for _ in range(slots)]
        warp_ids = np.arange(warps)
        self.known[GENERIC, :, warp_ids, warp_ids] += CLOCK_STEP
        self.known[CONTROL, :, warp_ids, warp_ids] += CLOCK_STEP

    def now(self) -> Stamps:
        """Returns the stamps of the warps' current accesses, without instructions: `[slots * warps]`.  Later ticks do
        not change the result."""
        if self._now is None:
            self._now = self.current[:, : self.warps].flatten()
        return self._now

    def barrier(self, slots: IndexOrArray, warps: IndexOrArray, key: Hashable = None) -> None:
        """Executes `bar.sync` for `warps` in each CTA of `slots`.  The earlier accesses of all these warps are then
        ordered before their later accesses.

        `key` is a named barrier, for a single CTA.  With `key`, accesses before a `bar.arrive` at this barrier are
        ordered too."""
        slot_ids, w = _outer(slots, warps)
        if key is not None and (sync_object := self._objects[int(slot_ids[0, 0])].pop(key, None)) is not None:
            self.known[:, slot_ids, w] = np.maximum(self.known[:, slot_ids, w], sync_object.pending[:, None, None])
        if not w.size:
            return
        self.known[:, slot_ids, w] = self.known[:, slot_ids, w].max(axis=2, keepdims=True)
        self._advance(slot_ids, w)

    def fence_proxy_async(self, slots: IndexOrArray, warps: IndexOrArray) -> None:
        """Executes `fence.proxy.async` in the given warps.  Accesses that happen before the fence are then ordered
        before later operations of the async proxy."""
        slot_ids, w = _outer(slots, warps)
        self.known[ASYNC, slot_ids, w] = self.known[GENERIC, slot_ids, w]
        self.fence_mbarrier_init(slots, warps)

    def fence_mbarrier_init(self, slots: IndexOrArray, warps: IndexOrArray) -> None:
        """Executes `fence.mbarrier_init` in the given warps.  Earlier mbarrier inits are then ordered before later uses
        of the mbarriers."""
        slot_ids, w = _outer(slots, warps)
        self.known[INIT, slot_ids, w] = self.known[GENERIC, slot_ids, w]
        self._advance(slot_ids, w)

    def signal(self, slot: int, warps: IndexOrArray, key: Hashable) -> None:
        """Records that `warps` arrive at a barrier.  Their earlier accesses are then ordered before warps that wait for
        this barrier.  `key` identifies the barrier, for example by the address of an mbarrier."""
        w = _flat(warps)
        self._object(slot, key).join(self.known[:, slot, w].max(axis=1))
        self._advance(slot, w)

    def signal_inits(self, slot: int, warps: IndexOrArray, key: Hashable) -> None:
        """Records that `warps` arrive at a barrier with relaxed semantics.  Such an arrival orders no accesses, except
        mbarrier inits before a `fence.mbarrier_init`.  `key` identifies the barrier."""
        w = _flat(warps)
        for plane in (INIT, CONTROL):
            self._object(slot, key).join_one(plane, slice(None), self.known[plane, slot, w].max(axis=0))
        self._advance(slot, w)

    def complete(self, slot: int, key: Hashable) -> None:
        """Ends the current phase of the barrier `key`.  Later signals belong to the next phase."""
        self._object(slot, key).complete()

    def wait(self, slot: int, warps: IndexOrArray, key: Hashable) -> None:
        """Records that the warps wait for the last completed phase of the barrier `key`.  Work that was released to the
        barrier before the end of this phase is then ordered before the warps' next accesses."""
        completed_stamps = self._object(slot, key).completed
        if completed_stamps is not None:
            w = _flat(warps)
            self.known[:, slot, w] = np.maximum(self.known[:, slot, w], completed_stamps[:, None])

    def begin_async(self, slot: int, warps: IndexOrArray, kind: str) -> AsyncOperation:
        """Begins an asynchronous operation of `warps`.  `kind` is TMA_LOAD, WGMMA or BULK.  An earlier access is
        ordered before the operation only if it is ordered before all of `warps`.

        Raises `ValueError` on any other kind."""
        w = _flat(warps)
        if kind == WGMMA:  # its four warps run it together
            self.known[CONTROL, slot, w] = self.known[CONTROL, slot, w].max(axis=0)
        known_stamps: Stamps = self.known[:, slot, w].min(axis=1)
        self._advance(slot, w)
        if kind == TMA_LOAD:
            actor = self._pool + self._next[slot]
            self._next[slot] = (self._next[slot] + 1) % (self.actors - self._pool)
        elif kind in (WGMMA, BULK):
            actor = self.warps * (1 + _STREAM_KINDS.index(kind)) + int(w[0])
        else:
            raise ValueError(f"kind: expected {TMA_LOAD!r}, {WGMMA!r} or {BULK!r}, got {kind!r}")
        self.current[slot, actor] += CLOCK_STEP
        stamp = int(self.current[slot, actor])
        known_stamps[:, actor] = _next_tick(stamp)
        return AsyncOperation(slot, actor, stamp, known_stamps)

    def acquire_async(self, slot: int, warps: IndexOrArray, transfer: AsyncOperation) -> None:
        """Records wait_group: the warps have waited for `transfer` and all earlier operations of its stream."""
        known_limits = self.known[:, slot, _flat(warps), transfer.actor]
        self.known[:, slot, _flat(warps), transfer.actor] = np.maximum(known_limits, _next_tick(transfer.stamp))

    def signal_async(self, transfer: AsyncOperation, key: Hashable) -> None:
        """Records complete_tx: the asynchronous `transfer` arrives at the mbarrier `key`.  A wait for the mbarrier
        orders only the transfer's own accesses, not other work of the warp that issued it."""
        self._object(transfer.slot, key).join_one(slice(None), transfer.actor, _next_tick(transfer.stamp))
        self._object(transfer.slot, key).join_one(CONTROL, slice(None), transfer.known[CONTROL])

    def commit_copies(self, slots: IndexOrArray, warps: IndexOrArray) -> None:
        """Records cp.async.commit_group by all lanes of the warps."""
        slot_ids, w = _outer(slots, warps)
        self.current[slot_ids, self.copies + w] += CLOCK_STEP

    def wait_copies(self, slots: IndexOrArray, warps: IndexOrArray, pending: int = 0) -> None:
        """Records cp.async.wait_group: all committed groups except the last `pending` groups are complete.

        Operations of the async proxy still need a proxy fence, because cp.async writes through the generic proxy.  For
        cp.async.wait_all, call `commit_copies` first.
        """
        s, w = _outer(slots, warps)
        copy_limits = (self.current[s, self.copies + w] & ~LOWER_MASK) - pending * CLOCK_STEP
        self.known[GENERIC, s, w, self.copies + w] = np.maximum(self.known[GENERIC, s, w, self.copies + w], copy_limits)

    def signal_copies(self, slot: int, warps: IndexOrArray, key: Hashable) -> None:
        """Records `cp.async.mbarrier.arrive` by `warps`: all their earlier cp.async copies arrive at an mbarrier.
        `key` is the address of the mbarrier.  The copies also become a committed group."""
        w = _flat(warps)
        copy_streams = self.copies + w
        self._object(slot, key).join_one(GENERIC, copy_streams, _next_tick(self.current[slot, copy_streams]))
        self._object(slot, key).join_one(CONTROL, slice(None), self.known[CONTROL, slot, w].max(axis=0))
        self.current[slot, copy_streams] += CLOCK_STEP

    def unwaited(self, slot: int, warp: int, key: Hashable) -> list[int]:
        """Returns the TMA loads that arrived at the mbarrier `key`, but are not ordered before the next access of
        `warp`.  Each load is given by the number of its asynchronous stream."""
        arrived_stamps = self._object(slot, key).pending[GENERIC, self._pool :]
        return [
            self._pool + int(i) for i in np.flatnonzero(arrived_stamps > self.known[GENERIC, slot, warp, self._pool :])
        ]

    def never_awaited(self, slot: int) -> list[int]:
        """Returns the last access of each asynchronous stream in `slot` (a CTA or a cluster), if no warp has waited for
        it.  An access is given by its stamp: an integer with its clock, instruction and stream."""
        latest_stamps = self.latest[slot]
        return [int(stamp) for stamp in latest_stamps[latest_stamps >= self.known[GENERIC, slot].max(axis=0)]]

    def name_of(self, actor: int) -> str:
        """Returns the name of an actor: `warp 2`, `wgmma of warp 4` or `a TMA load`."""
        kind_index, warp = divmod(actor, self.warps)
        if kind_index > len(_STREAM_KINDS):
            return "a TMA load"
        warp_name = f"warp {warp}"
        if self._ctas:
            cta_index, local_warp = divmod(warp, self.warps // len(self._ctas))
            warp_name = f"warp {local_warp} of CTA {self._ctas[cta_index]}"
        return f"{('wgmma', 'a bulk store', 'cp.async')[kind_index - 1]} of {warp_name}" if kind_index else warp_name

    def tick(self, slot: int, warp: int) -> None:
        """Begins a new tick of a warp's clock, so that its next accesses differ from those before."""
        self._advance(slot, _flat(warp))

    def _advance(self, s: IndexOrArray, w: npt.NDArray[np.integer]) -> None:
        self.current[s, w] += CLOCK_STEP
        self._now = None
        self.known[GENERIC, s, w, w] += CLOCK_STEP
        self.known[CONTROL, s, w, w] += CLOCK_STEP

    def _object(self, slot: int, key: Hashable) -> _SyncObject:
        sync_objects = self._objects[slot]
        if key not in sync_objects:
            sync_objects[key] = _SyncObject(self.actors)
        return sync_objects[key]


class _SyncObject:
    """Stores which accesses a barrier orders before the warps that wait for it.  `pending` has the accesses that were
    released to the barrier so far.  `completed` has those up to the end of the last phase.  Both store accesses as the
    logical times of warps and asynchronous streams."""

    def __init__(self, actors: int) -> None:
        self.pending: Stamps = np.zeros((4, actors), np.int64)
        self.completed: Stamps | None = None

    def join(self, known: Stamps) -> None:
        np.maximum(self.pending, known, out=self.pending)

    def join_one(self, plane: int | slice, actors: IndexOrArray | slice, known: int | Stamps) -> None:
        self.pending[plane, actors] = np.maximum(self.pending[plane, actors], known)

    def complete(self) -> None:
        self.completed = self.pending.copy()


def _flat(index: IndexOrArray) -> npt.NDArray[np.integer]:
    return np.asarray(index).reshape(-1)


def _outer(slots: IndexOrArray, warps: IndexOrArray) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Returns the indices as arrays `[slots, 1]` and `[1, warps]`. Together they select every pair of a slot and a
    warp."""
    return np.asarray(slots).reshape(-1, 1), np.asarray(warps).reshape(1, -1)


def _next_tick(stamp: _Stamp) -> _Stamp:
    return (stamp | LOWER_MASK) + 1


class MapOrder:
    """Checks that a kernel fences its writes of tensor maps before their use.  `clocks` gives the order of accesses.

    TMA reads tensor maps through a separate proxy (PTX ISA 8.7, section "membar/fence").  So after a write of a map, a
    warp must run fence.proxy.tensormap with .acquire.  The map's users must synchronise with this warp."""

    def __init__(self, clocks: VectorClocks) -> None:
        self._clocks = clocks
        self._writes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._fences: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def write(self, slot: int, warp: int, address: int, instruction: int) -> None:
        """Records that `warp` of the CTA in `slot` writes the tensor map at the global `address`."""
        self._writes[slot, address] = warp, self._now(slot, warp), instruction
        self._fences[slot, address] = []

    def fence(self, slot: int, warp: int, address: int) -> None:
        """Records fence.proxy.tensormap with .acquire, if the map's write is ordered before this fence."""
        last_write = self._writes.get((slot, address))
        if last_write is not None and self._knows(slot, warp, last_write[0], last_write[1]):
            self._fences[slot, address].append((warp, self._now(slot, warp)))

    def use(self, slot: int, warp: int, address: int) -> int | None:
        """Checks a use of the tensor map at `address` by `warp`.  A fence must come between the write of the map and
        its use.  If the fence is missing, returns the instruction that wrote the map.  Otherwise returns None."""
        last_write = self._writes.get((slot, address))
        if last_write is None or any(self._knows(slot, warp, *map_fence) for map_fence in self._fences[slot, address]):
            return None
        return last_write[2]

    def _now(self, slot: int, warp: int) -> int:
        return int(self._clocks.current[slot, warp])

    def _knows(self, slot: int, warp: int, other: int, stamp: int) -> bool:
        return stamp < int(self._clocks.known[GENERIC, slot, warp, other])
