"""Runs the CTAs of a grid in batches.  A batch is one cluster, or the CTAs that fit into one NumPy vector."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rooflab.bench.compile.cases import resident_ctas
from rooflab.bench.emulator.machine.run import CtaGroup, EmulationError, Fault, Run, most_seconds
from rooflab.bench.emulator.machine.schedule import MOST_NAMED, Schedule
from rooflab.bench.emulator.races.lane_stores import LaneStores
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import MapOrder

MAX_LANES = 8192
"""The most lanes of one vector.  More lanes gain nothing, because their registers no longer fit the caches."""
MAX_WATCHED_LANES = 4096
"""The most lanes of one vector under the race detector, which keeps 100 bytes or more for each lane."""
MAX_BATCH_BYTES = 64 << 20
"""The most bytes of shared and local memory of CTAs that run at once."""
MOST_POLLS = 5000
"""The most rounds in which all threads only poll and no memory changes; after them the threads count as stuck."""
MAX_TIME_FACTOR = 5
"""The time limit for the next CTA to end grows with the number of running batches, but not beyond this number."""
SURE = 4
"""The number of rounds without a change after which threads that repeat their states count as stuck."""


def _lots(run: Run, ctas: Sequence[int]) -> Iterator[list[int]]:
    """Yields the batches in which the CTAs of a grid run. A batch is one cluster, or several CTAs in one NumPy
    vector."""
    if run.has_clusters:
        yield from _clusters(run, ctas)
        return
    if run.program.sequential:
        yield from ([cta] for cta in ctas)
        return
    lanes_per_cta = -(-run.block[0] * run.block[1] * run.block[2] // 32) * 32
    max_lanes = MAX_WATCHED_LANES if run.checks.races else MAX_LANES
    batch_size = max(1, max_lanes // lanes_per_cta)
    cta_bytes = run.shared_size + lanes_per_cta * run.local_size
    if cta_bytes:
        batch_size = max(1, min(batch_size, MAX_BATCH_BYTES // cta_bytes))
    for batch_start in range(0, len(ctas), batch_size):
        yield list(ctas[batch_start : batch_start + batch_size])


def _clusters(run: Run, ctas: Sequence[int]) -> Iterator[list[int]]:
    lots: dict[tuple[int, ...], list[int]] = {}
    for cta in ctas:
        cta_xyz = (cta % run.grid[0], cta // run.grid[0] % run.grid[1], cta // (run.grid[0] * run.grid[1]))
        lots.setdefault(tuple(index // size for index, size in zip(cta_xyz, run.cluster, strict=True)), []).append(cta)
    cta_count = run.cluster[0] * run.cluster[1] * run.cluster[2]
    for cluster_ctas in lots.values():
        if len(cluster_ctas) != cta_count:
            raise ValueError(f"ctas: expected whole clusters of {cta_count}, got {cluster_ctas}")
        yield sorted(cluster_ctas)  # a CTA's place is its rank


def execute(run: Run, ctas: Sequence[int], registers: Callable[[], int]) -> None:
    """Runs the CTAs `ctas`.  Never runs more CTAs at the same time than fit on an H100.

    `registers` returns the number of registers per thread.  Raises `EmulationError` if the kernel has a fault.
    """
    batch_iterator = _lots(run, ctas)
    batches: list[tuple[Schedule, Iterator[bool]]] = []
    # By registers per thread, how many CTAs an H100 runs at once.  None stands for a number that limits nothing.
    fits = partial(resident_ctas, math.prod(run.block), shared_bytes=run.shared_limit)
    room, has_exact_room = fits(None), fits(None) == fits(1)  # registers count only where CTAs could be too many
    next_batch, idle_rounds, started_count = next(batch_iterator, None), 0, 0
    with np.errstate(all="ignore"):
        while batches or next_batch is not None:
            taken = sum(len(schedule.group.ctas) for schedule, _ in batches)
            if taken + len(next_batch or ()) > room and not has_exact_room:
                room, has_exact_room = fits(registers()), True
            free_ctas = room - taken
            if next_batch is not None and (not batches or free_ctas >= (len(next_batch) if run.has_clusters else 1)):
                batch_ctas = next_batch if run.has_clusters else next_batch[:free_ctas]
                batches.append(_begin(run, batch_ctas))
                started_count += len(batch_ctas)
                _wait_again(run, batches)
                next_batch = next_batch[len(batch_ctas) :] or next(batch_iterator, None)
            change_count, idle_rounds = run.changes, idle_rounds + 1
            for running_batch in list(batches):
                schedule, pause_iterator = running_batch
                is_polling = next(pause_iterator, None)
                if is_polling is None:
                    _end(run, schedule)
                    batches.remove(running_batch)
                    _wait_again(run, batches)
                if not is_polling:
                    idle_rounds = 0
            if run.changes != change_count:
                idle_rounds = 0
            if idle_rounds > MOST_POLLS or (idle_rounds > SURE and all(schedule.stuck() for schedule, _ in batches)):
                text = _waits_for_ever([schedule for schedule, _ in batches])
                if (n_left := len(ctas) - started_count) > 0:
                    running = sum(len(schedule.group.ctas) for schedule, _ in batches)
                    text += f"; an H100 holds these {running} CTAs at once, and {n_left} of {len(ctas)} have not begun"
                raise EmulationError(batches[0][0].stopped("deadlock", text))


def _wait_again(run: Run, going: Sequence[object]) -> None:
    """Restarts the time limit of the emulated run. The limit is longer if more batches of CTAs take turns."""
    run.deadline = time.thread_time() + most_seconds() * min(len(going), MAX_TIME_FACTOR)


def _waits_for_ever(schedules: Sequence[Schedule]) -> str:
    wait_texts = [wait_text for batch_schedule in schedules for wait_text in batch_schedule.describe()]
    suffix = f"; and {len(wait_texts) - MOST_NAMED} more" if len(wait_texts) > MOST_NAMED else ""
    return f"nothing can go on: all wait for what nobody writes; {'; '.join(wait_texts[:MOST_NAMED])}{suffix}"


def _begin(run: Run, ctas: list[int]) -> tuple[Schedule, Iterator[bool]]:
    cta_group = CtaGroup(run, ctas)
    global_races = run.global_races if run.orders_ctas else None
    if run.checks.races and (run.shared_size or global_races is not None or run.warp_races is not None):
        cta_group.races = _races(run, cta_group)
        cta_group.maps = MapOrder(cta_group.races)
        cta_group.lane_stores = LaneStores(cta_group.races, run.lane_releases)
        if global_races is not None:
            for cta_index, cta in enumerate(ctas):
                race_slot, first_warp = divmod(cta_index * cta_group.lanes_per_cta // 32, cta_group.race_warps)
                global_races.attach(cta, cta_group.races, race_slot, first_warp, ctas[0] if run.has_clusters else None)
    batch_schedule = Schedule(cta_group, run.seed or None)
    return batch_schedule, batch_schedule.run()


def _races(run: Run, group: CtaGroup) -> SharedRaces:
    """Makes the race detector of a group of CTAs. It treats a cluster as one unit, because its CTAs access each other's
    memory."""
    n_bytes, warps = run.shared_size or 1024, group.race_warps
    if not run.has_clusters:
        return SharedRaces(len(group.ctas), warps, n_bytes, run.program.granules["shared"])
    ctas = len(group.ctas)
    return SharedRaces(1, warps, ctas * n_bytes, run.program.granules["shared"], async_slots=64 * ctas, ctas=group.ctas)


def _end(run: Run, schedule: Schedule) -> None:
    cta_group = schedule.group
    try:
        schedule.waiting.transfers.drain()
        schedule.waiting.registers.check()
    except Fault as fault:
        raise EmulationError(schedule.finding(fault, cta_group.ctas[:1])) from None
    if cta_group.races is not None:
        for slot in range(cta_group.races.slots):
            cta_group.races.end(slot)
        for race in cta_group.races.found:
            slot, address = divmod(race.slot * cta_group.races.size + race.address, run.shared_size or 1024)
            run.shared_races.append(replace(race, slot=cta_group.ctas[slot], address=address))
