"""One launch: its arguments, its memory, its CTAs in lots, and what was seen."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.counting import Counter
from rooflab.bench.ptx.machine.errors import EmulationError, Fault
from rooflab.bench.ptx.machine.group import SHARED_WINDOW, Group, Triple
from rooflab.bench.ptx.machine.memory import GlobalMemory
from rooflab.bench.ptx.machine.observe import Observer
from rooflab.bench.ptx.machine.schedule import Schedule
from rooflab.bench.ptx.machine.shared_access import shared_offsets
from rooflab.bench.ptx.program import Program
from rooflab.bench.ptx.races.global_races import GlobalRaces
from rooflab.bench.ptx.races.map_order import MapOrder
from rooflab.bench.ptx.races.shared_races import SharedRaces

MOST_LANES = 8192
"""Lanes of one vector: more CTAs at once gain nothing, because their registers no longer fit the caches."""
MOST_WATCHED_LANES = 4096
"""The same under the race detector, which keeps 100 bytes and more for each of theirs."""
MOST_SHARED_BYTES = 64 << 20
"""Shared and local memory of CTAs that run at once."""
MOST_THREADS = 1024
SHARED_LIMIT = 227 << 10
"""Bytes of shared memory that a CTA may have on Hopper."""
MOST_POLLS = 5000
"""Rounds in which all threads only ask for what nobody writes; then they would for ever."""
MOST_NAMED = 6
"""Waits that a message names."""
MOST_RESIDENT = 8
"""CTAs of a multiprocessor that may be on their way at once while some wait for others."""


@dataclass(frozen=True)
class Checks:
    """What is looked for beside values; each costs time."""

    races: bool = True
    """Accesses that nothing orders, in shared and in global memory."""
    uninitialised: bool = True
    """Reads of memory that nobody has written."""
    asynchronous: bool = True
    """Copies end as late as they may, and poison lies where they will write."""
    counts: bool = True
    """Bytes, sectors, bank conflicts, instructions."""

    @classmethod
    def none(cls) -> Checks:
        """Values alone."""
        return cls(False, False, False, False)


class Run:
    """A launch of `program` on `grid` CTAs."""

    def __init__(
        self,
        program: Program,
        grid: Triple,
        block: Triple,
        *,
        memory: GlobalMemory,
        parameters: bytes,
        addresses: dict[str, int],
        static_shared: int,
        dynamic_shared: int,
        local_size: int,
        checks: Checks,
        cluster: Triple = (1, 1, 1),
        seed: int = 0,
        short_accumulator: bool = False,
        sms: int = 132,
    ):
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster
        self.has_clusters = cluster != (1, 1, 1)
        self.memory = memory
        self.parameter_bytes: npt.NDArray[np.uint8] = np.frombuffer(parameters + bytes(-len(parameters) % 16), np.uint8)
        self._addresses = addresses
        self.dynamic_shared = dynamic_shared
        self.shared_limit = static_shared + dynamic_shared
        self.shared_size = -(-self.shared_limit // 1024) * 1024
        self.local_size = -(-local_size // 16) * 16
        self.checks = checks
        self.seed = seed
        self.random = random.Random(seed) if seed else None
        self.short_accumulator = short_accumulator
        self.sms = sms
        self.steps = 0
        self.stored: list[tuple[Any, int]] | None = None
        """Addresses and width of every store to global memory, where somebody asks for them."""
        self.changes = 0
        """Stores, and atomics that left another value."""
        self.strong = program.strong
        version = [int(part) for part in program.module.version.split(".")]
        self.old_strides = version < [8, 6]
        """Before 8.6 ptxas took the strides of `tensormap.replace` in units of 16 bytes."""
        self.counter = Counter() if checks.counts else None
        ctas = grid[0] * grid[1] * grid[2]
        self.orders_ctas = program.orders_ctas or self.has_clusters
        self.actors_per_cta = -(-block[0] * block[1] * block[2] // 32) if self.orders_ctas else 1
        """Warps, where it counts for other CTAs what they know of one another."""
        self.global_races: GlobalRaces | None = None
        if checks.races and ctas > 1:
            self.global_races = GlobalRaces(ctas, program.granules["global"], warps=self.actors_per_cta)
            for allocation in memory.allocations:
                self.global_races.add(allocation.base, allocation.size)
        watched = self.counter is not None or checks.races
        self.observer = Observer(self, self.counter, self.global_races) if watched else None
        self.shared_races: list[Any] = []
        self.register_races: dict[int, int] = {}
        self.map_races: dict[tuple[int, int], None] = {}
        """Uses of tensor maps that lack a fence, each with the instruction that made the map."""
        self._granule = program.granules["shared"]

    # What the lanes' instructions ask.

    def address_of(self, name: str) -> int:
        """A variable's or a parameter's address in its own space."""
        return self._addresses[name]

    def count(self, place: int, grain: int, lanes: int) -> None:
        """A block was run."""
        self.steps += 1
        if self.counter is not None:
            self.counter.blocks[(place, grain)] += lanes

    def register_race(self, instruction: int) -> None:
        """An instruction read an accumulator whose wgmma may still be running."""
        self.register_races[instruction] = self.register_races.get(instruction, 0) + 1

    def atomic(
        self, c: Context, space: str, addresses: Any, lanes: Any, size: int, order: str, instruction: int
    ) -> None:
        """Lanes do an atomic operation."""
        if self.observer is None:
            return
        if space == "generic":
            windows = addresses >> np.uint64(60)
            for kind, where in ((SHARED_WINDOW >> 60, "shared"), (0, "global")):
                own = windows == kind
                if own.any():
                    self.atomic(c, where, addresses[own], lanes[own], size, order, instruction)
        elif space == "shared":
            near = addresses.astype(np.uint32)  # without the window of a generic address
            offsets = np.asarray(shared_offsets(c, near, size, lanes, instruction)).astype(np.int64)
            self.observer.shared_atomic(c, lanes, offsets, size, instruction)
        else:
            self.observer.global_atomic(c, lanes, addresses, size, order, instruction)

    # How it goes.

    def lots(self, ctas: Sequence[int]) -> Iterator[list[int]]:
        """CTAs that run in one vector, or as one cluster."""
        per_cluster = self.cluster[0] * self.cluster[1] * self.cluster[2]
        if per_cluster > 1:
            yield from self._clusters(ctas)
            return
        if self.program.sequential:
            yield from ([cta] for cta in ctas)
            return
        lanes = -(-self.block[0] * self.block[1] * self.block[2] // 32) * 32
        limit = MOST_WATCHED_LANES if self.checks.races else MOST_LANES
        many = max(1, limit // lanes)
        own = self.shared_size + lanes * self.local_size
        if own:
            many = max(1, min(many, MOST_SHARED_BYTES // own))
        for start in range(0, len(ctas), many):
            yield list(ctas[start : start + many])

    def _clusters(self, ctas: Sequence[int]) -> Iterator[list[int]]:
        lots: dict[tuple[int, ...], list[int]] = {}
        for cta in ctas:
            place = (cta % self.grid[0], cta // self.grid[0] % self.grid[1], cta // (self.grid[0] * self.grid[1]))
            lots.setdefault(tuple(at // size for at, size in zip(place, self.cluster, strict=True)), []).append(cta)
        wanted = self.cluster[0] * self.cluster[1] * self.cluster[2]
        for members in lots.values():
            if len(members) != wanted:
                raise EmulationError(f"ctas: expected whole clusters of {wanted}, got {members}")
            yield sorted(members)  # a CTA's place is its rank

    def execute(self, ctas: Iterable[int]) -> None:
        """Runs these CTAs.  Raises `EmulationError`."""
        resident = self._resident()
        waiting = self.lots(ctas if isinstance(ctas, range) else list(ctas))
        going: list[tuple[Schedule, Iterator[bool]]] = []
        idle = 0
        with np.errstate(all="ignore"):
            while True:
                if not going:
                    lot = next(waiting, None)
                    if lot is None:
                        return
                    going.append(self._begin(lot))
                before, idle = self.changes, idle + 1
                for item in list(going):
                    schedule, turns = item
                    polled = next(turns, None)
                    if polled is None:
                        self._end(schedule)
                        going.remove(item)
                    if not polled:
                        idle = 0
                if self.changes != before:
                    idle = 0
                if idle > MOST_POLLS:
                    raise EmulationError(self._nobody_writes([schedule for schedule, _ in going]))
                # Some take long, or wait for others: those get their turn too.
                if going and len(going) < resident and (lot := next(waiting, None)) is not None:
                    going.append(self._begin(lot))

    def _resident(self) -> int:
        """Lots of CTAs that may be on their way at once: as many as fit the device's shared memory."""
        each = max(1, min(MOST_RESIDENT, (SHARED_LIMIT + 1024) // (self.shared_limit + 1024)))
        return self.sms * each

    def _nobody_writes(self, schedules: Sequence[Schedule]) -> str:
        texts = [text for schedule in schedules for text in schedule.describe()]
        more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
        name = self.program.kernel.name
        return f"{name}: nothing can go on: all wait for what nobody writes; {'; '.join(texts[:MOST_NAMED])}{more}"

    def _begin(self, ctas: list[int]) -> tuple[Schedule, Iterator[bool]]:
        group = Group(self, ctas)
        ordered = self.global_races if self.orders_ctas else None
        if self.checks.races and (self.shared_size or ordered is not None):
            group.races = self._races(group)
            group.maps = MapOrder(group.races)
            if ordered is not None:
                for place, cta in enumerate(ctas):
                    slot, first = divmod(place * group.lanes_per_cta // 32, group.race_warps)
                    ordered.attach(cta, group.races, slot, first, ctas[0] if self.has_clusters else None)
        schedule = Schedule(group, self.seed or None)
        return schedule, schedule.run()

    def _races(self, group: Group) -> SharedRaces:
        """A cluster is one slot, since its CTAs reach each other's memory."""
        size, warps = self.shared_size or 1024, group.race_warps
        if not self.has_clusters:
            return SharedRaces(len(group.ctas), warps, size, self._granule)
        many = len(group.ctas)
        return SharedRaces(1, warps, many * size, self._granule, async_slots=64 * many, ctas=group.ctas)

    def _end(self, schedule: Schedule) -> None:
        group = schedule.group
        try:
            group.waiting.transfers.drain()
            group.waiting.registers.check()
        except Fault as fault:
            instruction = self.program.kernel.instructions[fault.instruction]
            text = f"{self.program.kernel.name}: {instruction.describe()}, CTA {group.ctas[0]}: {fault}"
            raise EmulationError(text) from None
        if group.races is not None:
            for slot in range(group.races.slots):
                group.races.end(slot)
            for race in group.races.found:
                slot, address = divmod(race.slot * group.races.size + race.address, self.shared_size or 1024)
                self.shared_races.append(replace(race, slot=group.ctas[slot], address=address))
