"""Runs the CTAs of a grid in batches.  A batch is one cluster, or the CTAs that fit into one NumPy vector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rooflab.bench.compile.cases import resident_ctas
from rooflab.bench.emulator.machine.run import CtaGroup, EmulationError, Fault, Run, most_seconds
from rooflab.bench.emulator.machine.schedule import MOST_NAMED, Schedule
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import MapOrder

MOST_LANES = 8192
"""The most lanes of one vector.  More lanes gain nothing, because their registers no longer fit the caches."""
MOST_WATCHED_LANES = 4096
"""The most lanes of one vector under the race detector, which keeps 100 bytes or more for each lane."""
MOST_SHARED_BYTES = 64 << 20
"""The most bytes of shared and local memory of CTAs that run at once."""
MOST_POLLS = 5000
"""The most rounds in which all threads only poll and no memory changes; after them the threads count as stuck."""
MOST_WAITS = 5
"""The time limit for the next CTA to end grows with the number of running batches, but not beyond this number."""
SURE = 4
"""The number of rounds without a change after which threads that repeat their states count as stuck."""


def _lots(run: Run, ctas: Sequence[int]) -> Iterator[list[int]]:
    """Yields batches of CTAs.  A batch runs in one NumPy vector, or is one cluster."""
    per_cluster = run.cluster[0] * run.cluster[1] * run.cluster[2]
    if per_cluster > 1:
        yield from _clusters(run, ctas)
        return
    if run.program.sequential:
        yield from ([cta] for cta in ctas)
        return
    lanes = -(-run.block[0] * run.block[1] * run.block[2] // 32) * 32
    limit = MOST_WATCHED_LANES if run.checks.races else MOST_LANES
    batch_size = max(1, limit // lanes)
    cta_bytes = run.shared_size + lanes * run.local_size
    if cta_bytes:
        batch_size = max(1, min(batch_size, MOST_SHARED_BYTES // cta_bytes))
    for start in range(0, len(ctas), batch_size):
        yield list(ctas[start : start + batch_size])


def _clusters(run: Run, ctas: Sequence[int]) -> Iterator[list[int]]:
    lots: dict[tuple[int, ...], list[int]] = {}
    for cta in ctas:
        position = (cta % run.grid[0], cta // run.grid[0] % run.grid[1], cta // (run.grid[0] * run.grid[1]))
        lots.setdefault(tuple(coord // size for coord, size in zip(position, run.cluster, strict=True)), []).append(cta)
    count = run.cluster[0] * run.cluster[1] * run.cluster[2]
    for members in lots.values():
        if len(members) != count:
            raise EmulationError(f"ctas: expected whole clusters of {count}, got {members}")
        yield sorted(members)  # a CTA's place is its rank


def execute(run: Run, ctas: Sequence[int], registers: Callable[[], int]) -> None:
    """Runs the CTAs `ctas`.  At one time, at most the number of CTAs that fit on an H100 run.

    `registers` returns the number of registers per thread.  Raises `EmulationError` if the kernel has a fault.
    """
    waiting = _lots(run, ctas)
    going: list[tuple[Schedule, Iterator[bool]]] = []
    capacity, upcoming, idle, begun = _Places(run, registers), next(waiting, None), 0, 0
    with np.errstate(all="ignore"):
        while going or upcoming is not None:
            free_ctas = capacity.free(sum(len(schedule.group.ctas) for schedule, _ in going), len(upcoming or ()))
            if upcoming is not None and (not going or free_ctas >= (len(upcoming) if run.has_clusters else 1)):
                batch = upcoming if run.has_clusters else upcoming[:free_ctas]
                going.append(_begin(run, batch))
                begun += len(batch)
                _wait_again(run, going)
                upcoming = upcoming[len(batch) :] or next(waiting, None)
            old_changes, idle = run.changes, idle + 1
            for item in list(going):
                schedule, turns = item
                polled = next(turns, None)
                if polled is None:
                    _end(run, schedule)
                    going.remove(item)
                    _wait_again(run, going)
                if not polled:
                    idle = 0
            if run.changes != old_changes:
                idle = 0
            if idle > MOST_POLLS or (idle > SURE and all(schedule.stuck() for schedule, _ in going)):
                text = _waits_for_ever(run, [schedule for schedule, _ in going])
                if (unbegun := len(ctas) - begun) > 0:
                    running = sum(len(schedule.group.ctas) for schedule, _ in going)
                    text += f"; an H100 holds these {running} CTAs at once, and {unbegun} of {len(ctas)} have not begun"
                raise EmulationError(text)


def _wait_again(run: Run, going: Sequence[object]) -> None:
    """Sets the time limit for the next CTA to end.  More batches get more time, because the batches alternate."""
    run.deadline = time.thread_time() + most_seconds() * min(len(going), MOST_WAITS)


class _Places:
    """Computes how many CTAs an H100 holds at once."""

    def __init__(self, run: Run, registers: Callable[[], int]):
        self._run, self._registers = run, registers
        self._room = self._with(None)
        """The CTAs that the H100 holds: at first without regard to registers, later with the kernel's registers."""
        self._exact = self._room == self._with(1)

    def _with(self, registers: int | None) -> int:
        x, y, z = self._run.block
        return resident_ctas(x * y * z, registers, self._run.shared_limit)

    def free(self, taken: int, more: int) -> int:
        """Returns the number of CTAs that fit beside the `taken` CTAs.  `more` CTAs are about to begin."""
        if taken + more > self._room and not self._exact:
            self._room, self._exact = self._with(self._registers()), True
        return self._room - taken


def _waits_for_ever(run: Run, schedules: Sequence[Schedule]) -> str:
    texts = [text for schedule in schedules for text in schedule.describe()]
    suffix = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    name = run.program.kernel.name
    return f"{name}: nothing can go on: all wait for what nobody writes; {'; '.join(texts[:MOST_NAMED])}{suffix}"


def _begin(run: Run, ctas: list[int]) -> tuple[Schedule, Iterator[bool]]:
    group = CtaGroup(run, ctas)
    global_races = run.global_races if run.orders_ctas else None
    if run.checks.races and (run.shared_size or global_races is not None):
        group.races = _races(run, group)
        group.maps = MapOrder(group.races)
        if global_races is not None:
            for index, cta in enumerate(ctas):
                slot, first = divmod(index * group.lanes_per_cta // 32, group.race_warps)
                global_races.attach(cta, group.races, slot, first, ctas[0] if run.has_clusters else None)
    schedule = Schedule(group, run.seed or None)
    return schedule, schedule.run()


def _races(run: Run, group: CtaGroup) -> SharedRaces:
    """Returns a race detector.  It checks a cluster as one unit, because its CTAs access each other's memory."""
    size, warps = run.shared_size or 1024, group.race_warps
    if not run.has_clusters:
        return SharedRaces(len(group.ctas), warps, size, run.program.granules["shared"])
    ctas = len(group.ctas)
    return SharedRaces(1, warps, ctas * size, run.program.granules["shared"], async_slots=64 * ctas, ctas=group.ctas)


def _end(run: Run, schedule: Schedule) -> None:
    group = schedule.group
    try:
        schedule.waiting.transfers.drain()
        schedule.waiting.registers.check()
    except Fault as fault:
        raise EmulationError(schedule.text(fault, group.ctas[:1])) from None
    if group.races is not None:
        for slot in range(group.races.slots):
            group.races.end(slot)
        for race in group.races.found:
            slot, address = divmod(race.slot * group.races.size + race.address, run.shared_size or 1024)
            run.shared_races.append(replace(race, slot=group.ctas[slot], address=address))
