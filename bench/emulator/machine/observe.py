"""Reports memory accesses, copies and fences of a kernel to the race detectors and the counter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.counting import Acting, Counter
from rooflab.bench.emulator.machine.launch_order import Turn
from rooflab.bench.emulator.machine.memory import Allocation, GlobalMemory
from rooflab.bench.emulator.races.global_races import GlobalRaces
from rooflab.bench.emulator.races.lane_stores import LaneStores, StoreMarks
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import BULK, TMA_LOAD, WGMMA, AsyncOperation
from rooflab.bench.emulator.races.warp_races import WarpLanes, WarpRaces
from rooflab.bench.emulator.text.syntax import PtxKernel

Lanes = npt.NDArray[np.int64]
MAX_BLOCK_BYTES = 1024
"""The most bytes of a memory range that the race detector takes at once."""


class Ctas(Protocol):
    """Describes a group of CTAs for `Observer`, which detects data races and counts memory traffic."""

    ctas: list[int]
    memory: GlobalMemory
    views: dict[int, npt.NDArray[Any]]
    shared_size: int
    races: SharedRaces | None
    lane_stores: LaneStores | None
    race_warps: int
    race_bytes: int

    def each_slot(self, warps: Lanes, act: Callable[[SharedRaces, int, Lanes], object]) -> None: ...


class Watched(Acting, Protocol):
    """Describes the attributes that the observer reads from lanes that run together."""

    slot: int | None
    slots: Lanes
    lanes: Lanes

    @property
    def group(self) -> Ctas: ...


class Observer:
    """Watches one launch: detects races on shared and global memory, and counts memory traffic."""

    def __init__(
        self,
        kernel: PtxKernel,
        strong: Mapping[int, str],
        actors_per_cta: int,
        has_clusters: bool,
        counter: Counter,
        global_races: GlobalRaces | None,
        warp_races: WarpRaces | None,
    ):
        self._kernel, self._strong = kernel, strong
        self._actors_per_cta, self._has_clusters = actors_per_cta, has_clusters
        self.counter = counter
        self.global_races, self._warp_races = global_races, warp_races
        self.turn: Turn | None = None
        """The launch's turn, if its accesses must be noted for other launches."""

    # Shared memory

    def _who(self, c: Watched, active: Any) -> tuple[Any, Lanes]:
        """Returns the race detector's slot of each active lane, and the lane's warp in this slot. A slot is a CTA or a
        cluster."""
        warps_per_slot = c.group.race_warps
        warps = c.warps if active is None else c.warps[active]
        if self._has_clusters:
            return 0, warps
        if c.slot is not None:
            return c.slot, warps - c.slot * warps_per_slot
        slots = c.slots if active is None else c.slots[active]
        return slots, warps % warps_per_slot

    def shared_read(self, c: Watched, active: Any, offsets: Any, size: int, instruction: int) -> None:
        """Reports that lanes read shared memory."""
        self.counter.shared_access(c, active, offsets, size, instruction, "read")
        if c.group.races is not None:
            slots, warps = self._who(c, active)
            c.group.races.read(slots, warps, _addresses(offsets, len(warps)), size, instruction)

    def shared_write(self, c: Watched, active: Any, offsets: Any, size: int, instruction: int, value: Any) -> None:
        """Reports that lanes write shared memory."""
        self.counter.shared_access(c, active, offsets, size, instruction, "write")
        if c.group.races is not None:
            slots, warps = self._who(c, active)
            lane_offsets = _addresses(offsets, len(warps))
            memory_reader = None if value is None else lambda: c.group.views[size].take(lane_offsets // size)
            stored = c.group.races.write(slots, warps, lane_offsets, size, instruction, value, memory_reader)
            self._stored(c, active, stored, instruction)

    def shared_atomic(self, c: Watched, active: Any, offsets: Any, size: int, instruction: int) -> None:
        """Reports that lanes do an atomic operation on shared memory."""
        self.counter.add("shared_read_bytes", size * len(active), instruction)
        self.counter.add("shared_write_bytes", size * len(active), instruction)
        if c.group.races is not None:
            slots, warps = self._who(c, active)
            c.group.races.atomic(slots, warps, _addresses(offsets, len(warps)), size, instruction)
            self._order_by_memory(c, active)

    def proxy_fence(self, c: Watched, active: Any, kind: str) -> None:
        """Reports a proxy fence, which orders generic accesses and asynchronous copies."""
        if "mbarrier_init" in kind:
            self._each_slot(c, lambda races, slot, warps: races.fence_mbarrier_init(slot, warps), active)
            return
        if "async" in kind and "global" not in kind:
            self._each_slot(c, lambda races, slot, warps: races.fence_proxy_async(slot, warps), active)
        if "async" in kind and "shared" not in kind and self.global_races is not None:
            for actor_id in np.unique(self._actors(c, active)):
                self.global_races.proxy_fence(int(actor_id))

    def _order_by_memory(self, c: Watched, active: Any) -> None:
        """Reports strong or atomic accesses, which may order the warps' later arrivals at barriers."""
        self._each_slot(c, lambda races, slot, warps: races.through_memory(slot, warps), active)

    # Copies

    def copy_async(self, c: Watched, lanes: Lanes, offsets: Lanes, size: int, instruction: int) -> None:
        """Reports that lanes start copies with `cp.async`."""
        self.counter.add("shared_write_bytes", size * len(lanes), instruction)
        if c.group.races is not None:
            slots, warps = self._who(c, lanes)
            c.group.races.copy_async(slots, warps, offsets, size, instruction)

    def commit_copies(self, c: Watched) -> None:
        """Reports that lanes run `cp.async.commit_group`."""
        self._each_slot(c, lambda races, slot, warps: races.commit_copies(slot, warps))

    def wait_copies(self, c: Watched, newest: int | None) -> None:
        """Reports that lanes run `cp.async.wait_group`.  If `newest` is None, the wait is for all copies."""
        if newest is None:
            self.commit_copies(c)
        self._each_slot(c, lambda races, slot, warps: races.wait_copies(slot, warps, newest or 0))

    def signal_copies(self, c: Watched, active: Lanes, place: int, instruction: int) -> None:
        """Reports that lanes run `cp.async.mbarrier.arrive`."""
        self._each_slot(c, lambda races, slot, warps: races.arrive(slot, warps, place, instruction), active)
        self._each_slot(c, lambda races, slot, warps: races.signal_copies(slot, warps, place), active)

    def _each_slot(self, c: Watched, act: Any, active: Any = None) -> None:
        c.group.each_slot(c.warps if active is None else c.warps[active], act)

    def wgmma_read(self, group: Ctas, warps: Lanes, chunks: Lanes, instruction: int) -> AsyncOperation | None:
        """Reports that a wgmma of a warpgroup reads 16-byte chunks of shared memory."""
        self.counter.add("shared_matrix_bytes", 16 * len(chunks), instruction)
        if group.races is None:
            return None
        race_record = group.races.begin_async(int(warps[0]) // group.race_warps, warps % group.race_warps, WGMMA)
        group.races.async_read(race_record, chunks, 16, instruction)
        return race_record

    def load_begins(
        self, c: Watched, lane: int, start: int, size: int, barrier: int, instruction: int
    ) -> AsyncOperation | None:
        """Reports that a lane starts a bulk copy into shared memory."""
        self.counter.add("tma_load_bytes", size, instruction)
        races = c.group.races
        if races is None:
            return None
        slots, warps = self._who(c, np.array([lane]))
        race_record = races.begin_async(start // c.group.race_bytes, warps, TMA_LOAD)
        block_starts, block_bytes = _blocks(start, size)
        races.async_write(race_record, block_starts, block_bytes, instruction)
        # A CTA's own mbarrier needs no fence in a cluster either: Triton emits a fence only where other CTAs signal.
        is_remote_barrier = int(c.slots[lane]) != barrier // c.group.shared_size
        races.mbarrier_use_async(race_record, barrier, instruction, needs_fence=is_remote_barrier)
        return race_record

    def store_begins(self, c: Watched, lane: int, start: int, size: int, instruction: int) -> AsyncOperation | None:
        """Reports that a lane starts a bulk copy out of shared memory."""
        self.counter.add("tma_store_bytes", size, instruction)
        races = c.group.races
        if races is None:
            return None
        slots, warps = self._who(c, np.array([lane]))
        race_record = races.begin_async(int(np.atleast_1d(slots)[0]), warps, BULK)
        self._released(c, np.array([lane]), instruction)
        block_starts, block_bytes = _blocks(start, size)
        races.async_read(race_record, block_starts, block_bytes, instruction)
        return race_record

    # Global memory

    def global_read(
        self,
        c: Watched,
        active: Any,
        allocation: Allocation,
        addresses: Any,
        size: int,
        instruction: int,
        copy: bool,
        reduces: bool,
    ) -> None:
        """Reports that lanes or an asynchronous copy read global memory."""
        self.counter.global_access(c, active, allocation, addresses, size, instruction, "read", copy)
        if self.turn is not None and not reduces:
            self.turn.access(c, active, addresses, size, instruction, "read")
        # The read of a reduction is reported with its write, which is atomic.
        if allocation.read_only or reduces:
            return
        races, warp_races = self.global_races, self._warp_races
        if instruction in self._strong:
            self._order_by_memory(c, active)
        lane_addresses = _lane_addresses(addresses, c, active)
        if warp_races is not None:
            lanes = WarpLanes(c, active, instruction)
            if instruction in self._strong:
                warp_races.poll(lanes, lane_addresses, size)
                warp_races.synchronise(lanes, stores=False)
            else:
                warp_races.read(lanes, allocation.base, lane_addresses, size, copy)
        if races is not None:
            lane_actors = self._actors(c, active)
            if self._is_strong(instruction):
                races.poll(lane_actors, lane_addresses, size, instruction, self._is_near(instruction))
                self._synchronise(lane_actors, lane_addresses, self._strong[instruction], instruction, stores=False)
            else:
                races.read(lane_actors, lane_addresses, size, instruction, allocation.base)

    def global_write(
        self,
        c: Watched,
        active: Any,
        allocation: Allocation,
        addresses: Any,
        size: int,
        instruction: int,
        copy: bool,
        reduces: bool,
        value: Any,
        old: Callable[[], Any],
    ) -> None:
        """Reports that lanes or a copy write `value` to global memory.  `old()` returns the overwritten values."""
        self.counter.global_access(c, active, allocation, addresses, size, instruction, "write", copy)
        if self.turn is not None:
            self.turn.access(c, active, addresses, size, instruction, "atomic" if reduces else "write")
        races, warp_races = self.global_races, self._warp_races
        if instruction in self._strong:
            self._order_by_memory(c, active)
        lane_addresses = _lane_addresses(addresses, c, active)
        if warp_races is not None:
            lanes, base = WarpLanes(c, active, instruction), allocation.base
            if reduces or instruction in self._strong:
                warp_races.atomic(lanes, [base], lane_addresses, size)
                warp_races.synchronise(lanes, loads=False)
            else:
                stored = warp_races.write(lanes, base, lane_addresses, size, value, old)
                self._stored(c, active, stored, instruction, copy)
        if races is not None:
            lane_actors = self._actors(c, active)
            races.writes(allocation.base)
            if reduces:
                races.atomic(lane_actors, lane_addresses, size, instruction)
            elif self._is_strong(instruction):
                races.atomic(lane_actors, lane_addresses, size, instruction, self._is_near(instruction))
                self._synchronise(lane_actors, lane_addresses, self._strong[instruction], instruction)
            else:
                stored = races.write(lane_actors, lane_addresses, size, instruction, value, old)
                self._stored(c, active, stored, instruction, copy)
        if instruction in self._strong:
            self._released(c, active, instruction)

    def _actors(self, c: Watched, active: Any) -> Lanes:
        """Returns the actor of each lane for the detector of races between CTAs: its CTA, or its warp if CTAs may wait
        for each other."""
        slots, warps = (c.slots, c.warps) if active is None else (c.slots[active], c.warps[active])
        actors_per_cta = self._actors_per_cta
        lane_actors: Lanes = np.asarray(c.group.ctas)[slots] * actors_per_cta + warps % actors_per_cta
        return lane_actors

    def _is_strong(self, instruction: int) -> bool:
        return instruction in self._strong and not self._within_cta(instruction)

    def _within_cta(self, instruction: int) -> bool:
        """Tells whether an instruction has CTA scope, so that it does not synchronise with other CTAs."""
        opcode_parts = self._kernel.instructions[instruction].parts
        return "cta" in opcode_parts or ("cluster" in opcode_parts and not self._has_clusters)

    def _is_near(self, instruction: int) -> bool:
        """Tells whether an instruction has cluster scope instead of device scope."""
        return "cluster" in self._kernel.instructions[instruction].parts

    def _synchronise(self, actors: Lanes, where: Any, order: str, instruction: int, *, stores: bool = True) -> None:
        assert self.global_races is not None
        has_release, has_acquire = order in ("release", "acq_rel"), order in ("acquire", "acq_rel")
        is_cluster_scope = self._is_near(instruction)
        # In the lanes' order, in which `atomics` gives them their values: the last lane has seen all others.
        for actor_id, address in dict.fromkeys(zip(actors.tolist(), where.tolist(), strict=True)):
            self.global_races.synchronise(actor_id, address, has_release, has_acquire, stores, is_cluster_scope)

    def global_atomic(self, c: Watched, active: Lanes, addresses: Any, size: int, order: str, instruction: int) -> None:
        """Reports that lanes do an atomic operation on global memory."""
        self.counter.atomic(c.group.memory, addresses, size, instruction)
        self._order_by_memory(c, active)
        if self.turn is not None:
            self.turn.access(c, active, addresses, size, instruction, "atomic")
        races = self.global_races
        if races is None and self._warp_races is None:
            return
        lane_addresses = _lane_addresses(addresses, c, active)
        bases = [allocation.base for allocation, _ in c.group.memory.parts(addresses)]
        if self._warp_races is not None:
            lanes = WarpLanes(c, active, instruction)
            self._warp_races.atomic(lanes, bases, lane_addresses, size)
            self._warp_races.synchronise(lanes, loads=self._kernel.instructions[instruction].parts[0] != "red")
        if races is not None:
            lane_actors = self._actors(c, active)
            for base in bases:
                races.writes(base)
            if self._within_cta(instruction):
                races.write(lane_actors, lane_addresses, size, instruction)
            else:
                races.atomic(lane_actors, lane_addresses, size, instruction, self._is_near(instruction))
                self._synchronise(lane_actors, lane_addresses, order, instruction)
        self._released(c, active, instruction)

    @staticmethod
    def _stored(c: Watched, active: Any, stored: StoreMarks, instruction: int, copy: bool = False) -> None:
        if c.group.lane_stores is not None and not copy:
            c.group.lane_stores.add(c.lanes if active is None else c.lanes[active], stored, instruction)

    @staticmethod
    def _released(c: Watched, active: Any, instruction: int) -> None:
        if c.group.lane_stores is not None:
            c.group.lane_stores.release(c.lanes if active is None else c.lanes[active], instruction)

    def fence(self, c: Watched, instruction: int) -> None:
        """Reports that lanes run a fence of cluster, device or system scope."""
        if self.global_races is not None and not self._within_cta(instruction):
            for actor_id in np.unique(self._actors(c, None)):
                self.global_races.fence(int(actor_id), self._is_near(instruction))


def _lane_addresses(addresses: Any, c: Watched, active: Any) -> Any:
    if isinstance(addresses, np.generic):
        return np.full(len(c.slots if active is None else active), addresses)
    return addresses


def _addresses(offsets: Any, lanes: int) -> Any:
    offset_array = np.asarray(offsets).astype(np.int64)
    return np.full(lanes, offset_array) if not offset_array.ndim else offset_array


def _blocks(start: int, size: int) -> tuple[Lanes, int]:
    """Splits a range of bytes into aligned blocks of equal size. Returns the start of each block, and the block size in
    bytes."""
    block_bytes = MAX_BLOCK_BYTES
    while start % block_bytes or size % block_bytes:
        block_bytes //= 2
    return np.arange(start, start + size, block_bytes), block_bytes
