"""Vector clocks: what each warp in flight knows of the other warps and of asynchronous operations.

An access is stamped with its actor and the actor's clock.  It is ordered before every access whose actor knows that
clock.  This is the idea of FastTrack (Flanagan and Freund, 2009).  There are three planes of order.  GENERIC is plain
happens-before.  ASYNC is the order before operations of the async proxy (TMA, wgmma).  They see a generic write only
after a fence.proxy.async (PTX ISA 8.7, sections "Proxies" and "membar/fence"), which copies GENERIC into ASYNC.  INIT
is the order of mbarriers before operations that use them; there fence.mbarrier_init is enough.

A clock has the upper 32 bits of an int64, an instruction's number bits 12 to 31, the actor the lower 12 bits.
Knowledge of an actor is kept as the least stamp that is not known, so that `stamp < known` needs no shifting.

A slot is a CTA, or a cluster, whose CTAs reach each other's memory.  A slot with W warps has these actors.  W warps.  W
wgmma streams and W bulk streams: reads issued by a warp.  They complete in the order of issue, so one clock serves a
stream.  W cp.async streams: writes, also in order.  A pool for TMA loads: loads complete in any order and take a number
in turn.  A load that no warp waits for is forgotten when its number is used again and a warp waits for the later load.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

ONE = 1 << 32
"""One tick of a clock."""
LOWER = ONE - 1
ACTOR_BITS = 12
MOST_ACTORS = 1 << ACTOR_BITS
"""The most actors of a slot.  A cluster of 16 CTAs of 32 warps has 3072, with 64 actors per CTA for TMA loads."""
ACTOR = MOST_ACTORS - 1
"""The mask of the bits of a stamp that hold the actor."""
GENERIC, ASYNC, INIT = 0, 1, 2
"""The numbers of the three planes of order."""
WGMMA, BULK, COPY = "wgmma", "bulk", "cp.async"
LOAD = "load"
_STREAMS = (WGMMA, BULK, COPY)

Index = int | npt.NDArray[np.integer]
"""One slot or warp, or an array of slots or warps without repetition."""
Stamps = npt.NDArray[np.int64]
_Stamp = TypeVar("_Stamp", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class AsyncOperation:
    """One asynchronous operation, from its issue on."""

    slot: int
    actor: int
    stamp: int
    """The clock and the actor; each access adds its instruction's number."""
    known: Stamps
    """By plane, what is known to be ordered before the operation: (3, actors)."""


class VectorClocks:
    """The clocks of `slots` slots.  Each slot has `warps` warps, and `pool` actors for its TMA loads.

    A slot is a CTA.  With `ctas` there is one slot: the cluster of the CTAs with the numbers `ctas`, and `warps` counts
    the warps of all these CTAs.  Raises `ValueError` if a slot would have more than 4096 actors.
    """

    def __init__(self, slots: int, warps: int, pool: int = 64, ctas: Sequence[int] = ()) -> None:
        self.slots, self.warps = slots, warps
        self._ctas = ctas
        self.actors = warps * (1 + len(_STREAMS)) + pool
        if min(slots, warps, pool) < 1 or self.actors > MOST_ACTORS:
            raise ValueError(
                f"slots, warps, pool: expected at least 1 each and 4 * warps + pool <= {MOST_ACTORS}, "
                f"got {slots}, {warps}, {pool}"
            )
        self.readers = 3 * warps
        """The actors below this number can read: warps, wgmma streams and bulk streams."""
        self.copies = warps * (1 + _STREAMS.index(COPY))
        """The first actor of the cp.async streams; they follow in the order of the warps."""
        self._pool = self.copies + warps
        self.known = np.full((3, slots, warps, self.actors), ONE, np.int64)
        """By plane, slot, warp, and actor: the least stamp of the actor that the warp does not know."""
        self.current = np.full((slots, self.actors), ONE, np.int64) + np.arange(self.actors)
        """By slot and actor: the stamp, without an instruction, of the actor's current accesses."""
        self.latest = np.zeros((slots, self.actors), np.int64)
        """By slot and actor: the stamp of an asynchronous actor's last access."""
        self._next = [0] * slots
        self._objects: list[dict[Hashable, _SyncObject]] = [{} for _ in range(slots)]
        for slot in range(slots):
            self.restart(slot)

    def restart(self, slot: int) -> None:
        """Gives `slot` to another CTA: all earlier actions in `slot` are ordered before it."""
        self.current[slot] += ONE
        self.known[:, slot] = self.current[slot] & ~LOWER
        warps = np.arange(self.warps)
        self.known[GENERIC, slot, warps, warps] += ONE

    def barrier(self, slots: Index, warps: Index, key: Hashable = None) -> None:
        """Runs bar.sync: the warps learn all that any of them knows, separately in each of `slots`.

        A `key` needs a single slot: the warps also learn what bar.arrive signalled to `key` since its last barrier.
        """
        s, w = _outer(slots, warps)
        if key is not None and (arrived := self._objects[int(s[0, 0])].pop(key, None)) is not None:
            self.known[:, s, w] = np.maximum(self.known[:, s, w], arrived.pending[:, None, None])
        if not w.size:
            return
        self.known[:, s, w] = self.known[:, s, w].max(axis=2, keepdims=True)
        self._advance(s, w)

    def fence_proxy_async(self, slots: Index, warps: Index) -> None:
        """Runs fence.proxy.async: orders what the warps know and did before their later async-proxy operations."""
        s, w = _outer(slots, warps)
        self.known[ASYNC, s, w] = self.known[GENERIC, s, w]
        self.fence_mbarrier_init(slots, warps)

    def fence_mbarrier_init(self, slots: Index, warps: Index) -> None:
        """Orders the same as `fence_proxy_async`, but only before later asynchronous arrivals at mbarriers."""
        s, w = _outer(slots, warps)
        self.known[INIT, s, w] = self.known[GENERIC, s, w]
        self._advance(s, w)

    def signal(self, slot: int, warps: Index, key: Hashable) -> None:
        """Notes that the warps arrive at `key` (an mbarrier's address, a named barrier): they release all they know."""
        w = _flat(warps)
        self._object(slot, key).join(self.known[:, slot, w].max(axis=1))
        self._advance(slot, w)

    def signal_inits(self, slot: int, warps: Index, key: Hashable) -> None:
        """Notes a relaxed arrival.  It releases only the mbarrier inits that a `fence_mbarrier_init` has covered."""
        self._object(slot, key).join_one(INIT, slice(None), self.known[INIT, slot, _flat(warps)].max(axis=0))

    def complete(self, slot: int, key: Hashable) -> None:
        """Ends the phase of `key`: warps that wait for it learn what was signalled up to now, and nothing later."""
        self._object(slot, key).complete()

    def wait(self, slot: int, warps: Index, key: Hashable) -> None:
        """Notes that the warps have waited for the last completed phase of `key`, if there is one: an acquire."""
        completed = self._object(slot, key).completed
        if completed is not None:
            w = _flat(warps)
            self.known[:, slot, w] = np.maximum(self.known[:, slot, w], completed[:, None])

    def begin_async(self, slot: int, warps: Index, kind: str) -> AsyncOperation:
        """Begins an operation of `kind` LOAD, WGMMA or BULK issued by `warps`.  It knows only what all of `warps` know.

        Raises `ValueError` on another kind.
        """
        w = _flat(warps)
        known: Stamps = self.known[:, slot, w].min(axis=1)
        self._advance(slot, w)
        if kind == LOAD:
            actor = self._pool + self._next[slot]
            self._next[slot] = (self._next[slot] + 1) % (self.actors - self._pool)
        elif kind in (WGMMA, BULK):
            actor = self.warps * (1 + _STREAMS.index(kind)) + int(w[0])
        else:
            raise ValueError(f"kind: expected {LOAD!r}, {WGMMA!r} or {BULK!r}, got {kind!r}")
        self.current[slot, actor] += ONE
        stamp = int(self.current[slot, actor])
        known[:, actor] = _next_tick(stamp)
        return AsyncOperation(slot, actor, stamp, known)

    def acquire_async(self, slot: int, warps: Index, transfer: AsyncOperation) -> None:
        """Notes that the warps have waited (wait_group) for `transfer`, and so for earlier operations of its stream."""
        cells = self.known[:, slot, _flat(warps), transfer.actor]
        self.known[:, slot, _flat(warps), transfer.actor] = np.maximum(cells, _next_tick(transfer.stamp))

    def signal_async(self, transfer: AsyncOperation, key: Hashable) -> None:
        """Notes complete_tx: `transfer` arrives at `key`.  Releases what the transfer did, not what its issuer knew."""
        self._object(transfer.slot, key).join_one(slice(None), transfer.actor, _next_tick(transfer.stamp))

    def commit_copies(self, slots: Index, warps: Index) -> None:
        """Notes cp.async.commit_group of all lanes of the warps."""
        s, w = _outer(slots, warps)
        self.current[s, self.copies + w] += ONE

    def wait_copies(self, slots: Index, warps: Index, pending: int = 0) -> None:
        """Notes cp.async.wait_group: all committed groups except the last `pending` groups are done.

        Only the generic plane changes, because cp.async writes through the generic proxy.  For cp.async.wait_all, call
        `commit_copies` first.
        """
        s, w = _outer(slots, warps)
        done = (self.current[s, self.copies + w] & ~LOWER) - pending * ONE
        self.known[GENERIC, s, w, self.copies + w] = np.maximum(self.known[GENERIC, s, w, self.copies + w], done)

    def signal_copies(self, slot: int, warps: Index, key: Hashable) -> None:
        """Notes cp.async.mbarrier.arrive: all cp.async of the warps so far arrive at `key`, and count as committed."""
        w = _flat(warps)
        streams = self.copies + w
        self._object(slot, key).join_one(GENERIC, streams, _next_tick(self.current[slot, streams]))
        self.current[slot, streams] += ONE

    def unwaited(self, slot: int, warp: int, key: Hashable) -> list[int]:
        """The actors of TMA loads that have arrived at `key`, but that `warp` does not know to be complete."""
        signalled = self._object(slot, key).pending[GENERIC, self._pool :]
        return [self._pool + int(i) for i in np.flatnonzero(signalled > self.known[GENERIC, slot, warp, self._pool :])]

    def never_awaited(self, slot: int) -> list[int]:
        """The stamps of the last accesses of asynchronous actors that no warp of `slot` knows to be complete."""
        latest = self.latest[slot]
        return [int(stamp) for stamp in latest[latest >= self.known[GENERIC, slot].max(axis=0)]]

    def name_of(self, actor: int) -> str:
        """The name of an actor: `warp 2`, `wgmma of warp 4`, `a TMA load`."""
        kind, warp = divmod(actor, self.warps)
        if kind > len(_STREAMS):
            return "a TMA load"
        who = f"warp {warp}"
        if self._ctas:
            cta, number = divmod(warp, self.warps // len(self._ctas))
            who = f"warp {number} of CTA {self._ctas[cta]}"
        return f"{('wgmma', 'a bulk store', 'cp.async')[kind - 1]} of {who}" if kind else who

    def _advance(self, s: Index, w: npt.NDArray[np.integer]) -> None:
        self.current[s, w] += ONE
        self.known[GENERIC, s, w, w] += ONE

    def _object(self, slot: int, key: Hashable) -> _SyncObject:
        objects = self._objects[slot]
        if key not in objects:
            objects[key] = _SyncObject(self.actors)
        return objects[key]


class _SyncObject:
    """The releases to one barrier: `pending` grows; `completed` is the value of `pending` when the last phase ended."""

    def __init__(self, actors: int) -> None:
        self.pending: Stamps = np.zeros((3, actors), np.int64)
        self.completed: Stamps | None = None

    def join(self, known: Stamps) -> None:
        np.maximum(self.pending, known, out=self.pending)

    def join_one(self, plane: int | slice, actors: Index | slice, known: int | Stamps) -> None:
        self.pending[plane, actors] = np.maximum(self.pending[plane, actors], known)

    def complete(self) -> None:
        self.completed = self.pending.copy()


def _flat(index: Index) -> npt.NDArray[np.integer]:
    return np.asarray(index).reshape(-1)


def _outer(slots: Index, warps: Index) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Two index arrays that together select every pair of a slot and a warp."""
    return np.asarray(slots).reshape(-1, 1), np.asarray(warps).reshape(1, -1)


def _next_tick(stamp: _Stamp) -> _Stamp:
    return (stamp | LOWER) + 1


class MapOrder:
    """The writes and fences of tensor maps that a kernel makes itself, in the order that `clocks` know.

    TMA reads maps through a proxy of its own.  PTX ISA 8.7, section "membar/fence", on a map that was written in global
    memory: before a warp uses the map, the warp must execute a fence.proxy.tensormap with .acquire of the map's
    address, or must meet another warp that has done so.
    """

    def __init__(self, clocks: VectorClocks) -> None:
        self._clocks = clocks
        self._writes: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._fences: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def write(self, slot: int, warp: int, address: int, instruction: int) -> None:
        """Notes that `warp` of the CTA in `slot` writes the map at a global address."""
        self._writes[slot, address] = warp, self._now(slot, warp), instruction
        self._fences[slot, address] = []

    def fence(self, slot: int, warp: int, address: int) -> None:
        """Notes fence.proxy.tensormap with .acquire.  It has no effect if the map's write is not ordered before it."""
        write = self._writes.get((slot, address))
        if write is not None and self._knows(slot, warp, write[0], write[1]):
            self._fences[slot, address].append((warp, self._now(slot, warp)))

    def use(self, slot: int, warp: int, address: int) -> int | None:
        """The instruction that wrote the map that `warp` gives to TMA, if no fence lies between them; else None."""
        write = self._writes.get((slot, address))
        if write is None or any(self._knows(slot, warp, *fence) for fence in self._fences[slot, address]):
            return None
        return write[2]

    def _now(self, slot: int, warp: int) -> int:
        return int(self._clocks.current[slot, warp])

    def _knows(self, slot: int, warp: int, other: int, stamp: int) -> bool:
        return stamp < int(self._clocks.known[GENERIC, slot, warp, other])
