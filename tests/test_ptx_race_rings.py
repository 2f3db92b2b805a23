"""Races on shared memory in rings of stages, and on the words of mbarriers."""

import numpy as np
import pytest
from ptx_race_moves import ALL, EMPTY, FULL, INIT, INVAL, MMA, READ, SIZE, STAGE, TMA, USE, kinds, load, multiply

from rooflab.bench.ptx.races.shared_races import SharedRaces
from rooflab.bench.ptx.races.vector_clocks import BULK


@pytest.fixture
def races():
    return SharedRaces(1, 4, SIZE)


# Rings of stages: a producer warp loads, the others read


def run_ring(races, stages=2, steps=7, skip=None):
    """Warp 0 loads, warps 1 to 3 read; `skip` leaves out a part of the synchronisation at step 3."""
    readers = np.array([1, 2, 3])
    lanes = np.repeat(readers, 32)
    for step in range(steps):
        stage = step % stages
        left_out = skip if step == 3 else None
        if step >= stages and left_out != "empty wait":
            races.wait(0, 0, EMPTY + 8 * stage)
        load(races, stage)
        if left_out != "full wait":
            races.wait(0, readers, FULL + 8 * stage)
        races.read(0, lanes, STAGE * stage + np.arange(96) * 16, 16, READ)
        for warp in readers if left_out != "arrive" else readers[:2]:
            races.signal(0, int(warp), EMPTY + 8 * stage)
        races.complete(0, EMPTY + 8 * stage)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_ring_that_is_right_gives_no_report(races, stages):
    run_ring(races, stages)
    assert races.found == []


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("empty wait", [("write-write", TMA, TMA, False), ("read-write", READ, TMA, False)]),
        ("full wait", [("write-read", TMA, READ, False), ("write-write", TMA, TMA, False)]),
        ("arrive", [("read-write", READ, TMA, False)]),
    ],
)
def test_a_ring_without_one_part_is_reported(races, skip, expected):
    run_ring(races, skip=skip)
    assert kinds(races) == expected


def test_a_ring_of_wgmma_whose_wait_is_relaxed_is_reported():
    for pending, expected in ((0, []), (1, [("read-write", MMA, TMA, False)])):
        races = SharedRaces(1, 4, SIZE)
        issued = []
        for step in range(6):
            stage = step % 2
            load(races, stage)
            races.wait(0, ALL, FULL + 8 * stage)
            issued.append(multiply(races, stage))
            # The stage that the next load overwrites is that of the multiplication before this one.
            done = len(issued) - 1 - 1 - pending
            if done >= 0:
                races.acquire_async(0, ALL, issued[done])
            races.barrier(0, ALL)
        assert kinds(races) == expected


# mbarrier words


def test_an_mbarrier_is_used_after_its_init_and_a_barrier(races):
    races.mbarrier_init(0, 0, FULL, INIT)
    races.fence_proxy_async(0, 0)
    races.barrier(0, ALL)
    for warp in range(4):
        races.mbarrier_use(0, np.array([warp]), FULL, USE)
    races.mbarrier_use_async(load(races), FULL, TMA)
    races.wait(0, ALL, FULL)
    races.barrier(0, ALL)
    races.mbarrier_inval(0, 0, FULL, INVAL)
    assert races.found == []


def test_an_mbarrier_used_before_its_init_is_known_is_reported(races):
    races.mbarrier_init(0, 0, FULL, INIT)
    races.mbarrier_use(0, ALL, FULL, USE)
    assert kinds(races) == [("write-read", INIT, USE, False)]


@pytest.mark.parametrize("needs_fence", [True, False])
def test_a_load_that_arrives_wants_the_init_fenced(races, needs_fence):
    races.mbarrier_init(0, 0, FULL, INIT)
    races.barrier(0, ALL)
    races.mbarrier_use_async(load(races), FULL, TMA, needs_fence)
    assert kinds(races) == ([("write-read", INIT, TMA, True)] if needs_fence else [])


def test_a_load_that_arrives_wants_the_init_ordered_even_without_a_fence(races):
    races.mbarrier_init(0, 1, FULL, INIT)
    races.mbarrier_use_async(load(races), FULL, TMA, needs_fence=False)
    assert kinds(races) == [("write-read", INIT, TMA, False)]


def test_an_inval_before_the_uses_are_known_is_reported(races):
    races.mbarrier_init(0, 0, FULL, INIT)
    races.barrier(0, ALL)
    races.mbarrier_use(0, ALL, FULL, USE)
    races.mbarrier_inval(0, 0, FULL, INVAL)
    assert kinds(races) == [("read-write", USE, INVAL, False)]


def test_an_inval_while_a_load_is_in_flight_is_reported(races):
    load(races)
    races.mbarrier_inval(0, 0, FULL, INVAL)
    assert [(race.kind, race.first_actor, race.address) for race in races.found] == [
        ("read-write", "a TMA load", FULL)
    ]  # fmt: skip


@pytest.mark.parametrize("fence", ["fence_proxy_async", "fence_mbarrier_init"])
def test_both_fences_order_the_making_of_an_mbarrier_but_one_only_what_was_stored(fence):
    races = SharedRaces(1, 4, SIZE)
    races.mbarrier_init(0, 0, FULL, INIT)
    races.write(0, np.zeros(32, np.int64), np.arange(32) * 4, 4, READ)
    getattr(races, fence)(0, 0)
    transfer = races.begin_async(0, 0, BULK)
    races.mbarrier_use_async(transfer, FULL, TMA)
    assert races.found == []
    races.async_read(transfer, np.array([0]), 128, TMA)
    assert kinds(races) == ([] if fence == "fence_proxy_async" else [("write-read", READ, TMA, True)])
