"""Runs barriers, mbarriers, fences and what else orders or ends threads."""

from __future__ import annotations

from typing import Any

import numpy as np

from rooflab.bench.ptx.machine.context import SPLIT, Context, Lanes
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import RANK_SHIFT


def _one(value: Any) -> int | None:
    """The one value of all lanes; None where they differ."""
    if isinstance(value, np.generic | int):
        return int(value)
    return int(value[0]) if (value == value[0]).all() else None


def _split(c: Context, keys: Any) -> int:
    """Lanes with different keys go on apart, from the same place."""
    c.children = [c.part(keys == key, c.place) for key in np.unique(keys)]
    return SPLIT


def sync(c: Context, number: Any, count: Any, following: int, instruction: int, guard: Any) -> int:
    """`bar.sync`."""
    if isinstance(guard, np.ndarray) and not guard.all():
        if not guard.any():
            return following
        c.children = [c.part(guard, c.place), c.part(~guard, following)]
        return SPLIT
    if isinstance(guard, np.bool_) and not guard:
        return following
    which = _one(number)
    if which is None:
        return _split(c, number)
    threads = None if count is None else _one(count)
    if count is not None and threads is None:
        return _split(c, count)
    barriers = c.group.waiting.barriers
    if (late := barriers.too_many(c, which, threads, instruction)) is not None:
        return _split(c, late)
    return barriers.sync(c, which, threads, following, instruction)


def arrive(c: Context, number: Any, count: Any, following: int, instruction: int, guard: Any) -> int:
    """`bar.arrive`."""
    if guard is not None and not np.all(guard):
        raise Fault("bar.arrive under a predicate that does not hold for all its threads", instruction)
    if count is None:
        raise Fault("bar.arrive wants the number of threads that the barrier waits for", instruction)
    which, threads = _one(number), _one(count)
    if which is None:
        return _split(c, number)
    if threads is None:
        return _split(c, count)
    barriers = c.group.waiting.barriers
    if (late := barriers.too_many(c, which, threads, instruction)) is not None:
        return _split(c, late)
    barriers.arrive(c, which, threads, instruction)
    return following


def reduce(
    c: Context, target: int, operation: str, number: Any, count: Any, predicate: Any, following: int, instruction: int
) -> int:
    """`bar.red`: a barrier that also adds up its threads' predicates."""
    which = _one(number)
    if which is None:
        return _split(c, number)
    threads = None if count is None else _one(count)
    if count is not None and threads is None:
        return _split(c, count)
    barriers = c.group.waiting.barriers
    if (late := barriers.too_many(c, which, threads, instruction)) is not None:
        return _split(c, late)
    yes = np.full(c.size, predicate) if isinstance(predicate, np.generic) else predicate
    c.registers[target] = None

    def settle(context: Context, votes: int, voters: int) -> None:
        found = {"popc": np.uint32(votes), "and": np.bool_(votes == voters), "or": np.bool_(votes > 0)}[operation]
        context.registers[target] = found

    return barriers.sync(c, which, threads, following, instruction, (yes, settle))


def warp_barrier(c: Context, mask: Any) -> None:
    """`bar.warp.sync`: the lanes are here together, or the scheduler would not have let them."""


def cluster_arrive(c: Context, release: bool, instruction: int) -> None:
    """`barrier.cluster.arrive`."""
    c.group.waiting.clusters.arrive(c, release, instruction)


def cluster_wait(c: Context, following: int, instruction: int) -> int:
    """`barrier.cluster.wait`."""
    return c.group.waiting.clusters.wait(c, following, instruction)


def proxy_fence(c: Context, kind: str, guard: Any, instruction: int) -> None:
    """`fence.proxy.*`, `fence.mbarrier_init`."""
    observer = c.group.run.observer
    active = None if guard is None else np.flatnonzero(np.broadcast_to(guard, c.size))
    if observer is not None and (active is None or len(active)):
        observer.proxy_fence(c, active, kind)


def fence(c: Context, instruction: int) -> None:
    """`fence`, `membar`."""
    observer = c.group.run.observer
    if observer is not None:
        observer.fence(c, instruction)


def trap(c: Context, guard: Any, instruction: int) -> None:
    """`trap`."""
    if np.any(guard):
        raise Fault("the kernel trapped", instruction)


def assertion_failed(c: Context, guard: Any, instruction: int) -> None:
    """A device-side assertion."""
    if np.any(guard):
        raise Fault("a device-side assertion failed", instruction)


def rank_of(c: Context, address: Any) -> Any:
    """`getctarank`."""
    ranks = (address >> address.dtype.type(RANK_SHIFT)) & address.dtype.type(0xFF)
    own = np.uint32(c.special("cluster_ctarank"))
    return np.where(ranks > 0, ranks - 1, own).astype(np.uint32)[()]


def mbarrier_init(c: Context, addresses: Any, count: Any, guard: Any, instruction: int) -> None:
    """`mbarrier.init`."""
    c.group.waiting.mbarriers.init(c, addresses, count, guard, instruction)


def mbarrier_inval(c: Context, addresses: Any, guard: Any, instruction: int) -> None:
    """`mbarrier.inval`."""
    c.group.waiting.mbarriers.inval(c, addresses, guard, instruction)


def mbarrier_arrive(
    c: Context, addresses: Any, count: Any, expect: Any, guard: Any, instruction: int, *, drop: bool, may_complete: bool
) -> Any:
    """`mbarrier.arrive` and `arrive_drop`, with `.expect_tx` and without."""
    mbarriers = c.group.waiting.mbarriers
    token = mbarriers.arrive(c, addresses, count, expect, guard, instruction, drop=drop, may_complete=may_complete)
    c.group.waiting.wake_mbarriers()
    return token


def mbarrier_expect(c: Context, addresses: Any, size: Any, guard: Any, instruction: int) -> None:
    """`mbarrier.expect_tx`."""
    c.group.waiting.mbarriers.expect(c, addresses, size, guard, instruction)
    c.group.waiting.wake_mbarriers()


def mbarrier_complete(c: Context, addresses: Any, size: Any, guard: Any, instruction: int) -> None:
    """`mbarrier.complete_tx`."""
    c.group.waiting.mbarriers.complete(c, addresses, size, guard, instruction)
    c.group.waiting.wake_mbarriers()


def mbarrier_wait(
    c: Context, addresses: Any, state: Any, parity: bool, blocks: bool, guard: Any, instruction: int
) -> Any:
    """`mbarrier.try_wait`, `mbarrier.test_wait`: whether the phase is over, for each lane.

    None where no lane may go on: they wait.  A part that may not gets no for an answer, as after a time-out.
    """
    mbarriers = c.group.waiting.mbarriers
    waits: list[tuple[int, int]] = []
    over: list[Lanes] = []
    pending = 0
    for place, lanes in mbarriers.lots(c, addresses, guard, instruction):
        for wanted, own in _by_parity(state, lanes):
            if mbarriers.is_complete(place, wanted, instruction):
                mbarriers.acquired(c, place, own, instruction)
                over.append(own)
            else:
                waits.append((place, wanted))
                pending += len(own)
    if not waits:
        return np.bool_(True)
    if blocks and pending == c.size:
        c.group.waiting.park_at_mbarriers(c, waits)
        return None
    c.polls(instruction, addresses)
    if not over:
        return np.bool_(False)
    found = np.zeros(c.size, np.bool_)
    found[np.concatenate(over)] = True
    return found


def _by_parity(state: Any, lanes: Lanes) -> list[tuple[int, Lanes]]:
    """The lanes that wait for odd phases and for even ones.

    A token is the number of its phase, and of a parity only the lowest bit counts: Triton passes -1 for 1.
    """
    if isinstance(state, np.generic):
        return [(int(state) & 1, lanes)]
    odd = state[lanes] & 1 == 1
    return [(wanted, own) for wanted, own in ((1, lanes[odd]), (0, lanes[~odd])) if len(own)]


def set_registers(c: Context, count: int, increase: bool, instruction: int) -> None:
    """`setmaxnreg`: how many registers the warps have from now on."""
    if not 24 <= count <= 256 or count % 8:
        raise Fault(f"setmaxnreg wants a multiple of 8 from 24 to 256, got {count}", instruction)
    c.group.waiting.registers.set(c, count, increase, instruction)
