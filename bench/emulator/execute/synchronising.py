"""Runs barriers, mbarriers, fences and changes of register counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.emulator.machine.context import SPLIT, LaneContext
from rooflab.bench.emulator.machine.memory import RANK_SHIFT
from rooflab.bench.emulator.machine.run import Fault, Lanes
from rooflab.bench.emulator.machine.waiting import waiting_of


def _common(value: Any) -> int | None:
    """Returns the common value of all lanes, or None if the lanes have different values."""
    if isinstance(value, np.generic | int):
        return int(value)
    return int(value[0]) if (value == value[0]).all() else None


def _split(c: LaneContext, keys: Any) -> int:
    """Splits the running lanes into groups with equal values in `keys`. All groups continue at the same instruction."""
    c.children = [c.part(keys == lane_key, c.place) for lane_key in np.unique(keys)]
    return SPLIT


def _barrier(c: LaneContext, number: Any, count: Any, instruction: int) -> tuple[int, int | None] | int:
    """Returns the number and the thread count of the barrier at which the lanes arrive. Returns `SPLIT` if the lanes
    differ and must be split first."""
    for operand_value in (number, count):
        if operand_value is not None and _common(operand_value) is None:
            return _split(c, operand_value)
    barrier_number, thread_count = int(_common(number) or 0), None if count is None else _common(count)
    extra_lanes = waiting_of(c.group).barriers.too_many(c, barrier_number, thread_count, instruction)
    return (barrier_number, thread_count) if extra_lanes is None else _split(c, extra_lanes)


def sync(c: LaneContext, number: Any, count: Any, following: int, instruction: int, guard: Any) -> int:
    """Runs `bar.sync`."""
    if guard is not None and (place := c.branch(c.vector(guard), c.place, following)) != c.place:
        return place
    chosen_barrier = _barrier(c, number, count, instruction)
    if isinstance(chosen_barrier, int):
        return chosen_barrier
    return waiting_of(c.group).barriers.sync(c, *chosen_barrier, following, instruction)


def arrive(c: LaneContext, number: Any, count: Any, following: int, instruction: int, guard: Any) -> int:
    """Runs `bar.arrive`."""
    if guard is not None and not np.all(guard):
        text = "bar.arrive under a predicate that does not hold for all its threads"
        raise Fault(text, instruction, rule="barrier")
    if count is None:
        raise Fault("bar.arrive wants the number of threads that the barrier waits for", instruction)
    chosen_barrier = _barrier(c, number, count, instruction)
    if isinstance(chosen_barrier, int):
        return chosen_barrier
    waiting_of(c.group).barriers.arrive(c, *chosen_barrier, instruction)
    return following


def reduce(
    c: LaneContext,
    target: int,
    operation: str,
    number: Any,
    count: Any,
    predicate: Any,
    following: int,
    instruction: int,
) -> int:
    """Runs `bar.red`, a barrier that also combines the predicates of its threads."""
    chosen_barrier = _barrier(c, number, count, instruction)
    if isinstance(chosen_barrier, int):
        return chosen_barrier
    c.registers[target] = None

    def settle(votes: int, voters: int) -> None:
        vote_results = {"popc": np.uint32(votes), "and": np.bool_(votes == voters), "or": np.bool_(votes > 0)}
        c.registers[target] = vote_results[operation]

    return waiting_of(c.group).barriers.sync(c, *chosen_barrier, following, instruction, (c.vector(predicate), settle))


def proxy_fence(c: LaneContext, kind: str, guard: Any) -> None:
    """Runs `fence.proxy.*` and `fence.mbarrier_init`."""
    observer = c.group.run.observer
    active_lanes = None if guard is None else np.flatnonzero(np.broadcast_to(guard, c.size))
    if observer is not None and (active_lanes is None or len(active_lanes)):
        observer.proxy_fence(c, active_lanes, kind)


def fence(c: LaneContext, instruction: int) -> None:
    """Runs `fence` and `membar`."""
    observer = c.group.run.observer
    if observer is not None:
        observer.fence(c, instruction)


def depend(c: LaneContext, action: str, guard: Any) -> None:
    """Runs `griddepcontrol`.  A CTA has waited as soon as one thread has; copies that began before may end before."""
    turn, lanes = c.group.run.turn, c.lanes_under(guard)
    if turn is not None and len(lanes):
        if action == "wait":
            waiting_of(c.group).transfers.finish()
            waiting_of(c.group).wake_mbarriers()
        slots = np.arange(len(c.group.ctas)) if c.group.run.has_clusters else np.unique(c.slots[lanes])
        turn.control(action, np.asarray(c.group.ctas)[slots])


def rank_of(c: LaneContext, address: Any) -> Any:
    """Runs `getctarank`: returns the rank of the CTA that owns a shared memory address."""
    rank_fields = (address >> address.dtype.type(RANK_SHIFT)) & address.dtype.type(0xFF)
    own_rank = np.uint32(c.special("cluster_ctarank"))
    return np.where(rank_fields > 0, rank_fields - 1, own_rank).astype(np.uint32)[()]


def update_mbarrier(c: LaneContext, operation: str, *arguments: Any, **options: bool) -> Any:
    """Calls a method of `MBarriers`, such as `arrive`.  Then resumes lanes if the phase that they wait for is over."""
    wait_state = waiting_of(c.group)
    call_result = getattr(wait_state.mbarriers, operation)(c, *arguments, **options)
    wait_state.wake_mbarriers()
    return call_result


def mbarrier_wait(c: LaneContext, addresses: Any, state: Any, blocks: bool, guard: Any, instruction: int) -> Any:
    """Runs `mbarrier.try_wait` and `mbarrier.test_wait`: returns for each lane whether its phase is over.

    `blocks` is true for `try_wait`.  If no lane's phase is over, `try_wait` stops the lanes and returns None.
    Otherwise a lane with an unfinished phase gets False, as after a time-out."""
    mbarriers = waiting_of(c.group).mbarriers
    awaited_phases: list[tuple[int, int]] = []
    done_lanes: list[Lanes] = []
    pending_count = 0
    for mbarrier_offset, lanes in mbarriers.lots(c, addresses, guard, instruction):
        for parity, phase_lanes in _by_parity(state, lanes):
            if mbarriers.is_complete(mbarrier_offset, parity, instruction):
                mbarriers.acquired(c, mbarrier_offset, phase_lanes, instruction)
                done_lanes.append(phase_lanes)
            else:
                awaited_phases.append((mbarrier_offset, parity))
                pending_count += len(phase_lanes)
    if not awaited_phases:
        return np.bool_(True)
    if blocks and pending_count == c.size:
        waiting_of(c.group).park_at_mbarriers(c, awaited_phases)
        return None
    c.polls(instruction, addresses)
    if not done_lanes:
        return np.bool_(False)
    done_mask = np.zeros(c.size, np.bool_)
    done_mask[np.concatenate(done_lanes)] = True
    return done_mask


def _by_parity(state: Any, lanes: Lanes) -> list[tuple[int, Lanes]]:
    """Groups the lanes by the parity of the mbarrier phase for which they wait. Returns pairs `(parity, lanes)`.

    `state` is a parity or a phase number. Only its lowest bit counts, because Triton passes -1 for 1.
    """
    if isinstance(state, np.generic):
        return [(int(state) & 1, lanes)]
    odd = state[lanes] & 1 == 1
    return [(parity, phase_lanes) for parity, phase_lanes in ((1, lanes[odd]), (0, lanes[~odd])) if len(phase_lanes)]


def set_registers(c: LaneContext, count: int, increase: bool, instruction: int) -> None:
    """Runs `setmaxnreg`, which sets the number of registers for each thread of the warps."""
    if not 24 <= count <= 256 or count % 8:
        raise Fault(f"setmaxnreg wants a multiple of 8 from 24 to 256, got {count}", instruction)
    waiting_of(c.group).registers.set(c, count, increase, instruction)
