"""Races of asynchronous operations on shared memory: cp.async, TMA, wgmma and the two proxies."""

import numpy as np
import pytest
from ptx_race_moves import (
    ALL,
    COPY,
    FULL,
    LANE_WARPS,
    LANES,
    MMA,
    READ,
    SAVE,
    SIZE,
    STAGE,
    STORE,
    TILE,
    TMA,
    copy,
    kinds,
    load,
    multiply,
    read,
    save,
    store,
)

from rooflab.bench.ptx.races.reports import describe
from rooflab.bench.ptx.races.shared_races import SharedRaces
from rooflab.bench.ptx.races.vector_clocks import LOAD


@pytest.fixture
def races():
    return SharedRaces(1, 4, SIZE)


# cp.async


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("meets", [True, False])
def test_a_copy_is_read_after_its_wait_and_a_barrier(races, waits, meets):
    copy(races)
    races.commit_copies(0, ALL)
    if waits:
        races.wait_copies(0, ALL)
    if meets:
        races.barrier(0, ALL)
    read(races)
    assert kinds(races) == ([] if waits and meets else [("write-read", COPY, READ, False)])


def test_a_warp_does_not_see_its_own_copy_before_it_waits(races):
    copy(races)
    races.commit_copies(0, ALL)
    races.read(0, LANE_WARPS, LANES, 16, READ)
    (race,) = races.found
    assert describe(race, str).endswith("with no wait for cp.async of warp 0 between")


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_wait_that_leaves_groups_pending_covers_only_the_older(races, pending):
    for stage in range(3):
        copy(races, STAGE * stage)
        races.commit_copies(0, ALL)
    races.wait_copies(0, ALL, pending)
    raced = []
    for stage in range(3):
        before = sum(race.count for race in races.found)
        races.read(0, LANE_WARPS, STAGE * stage + LANES, 16, READ)
        raced.append(sum(race.count for race in races.found) > before)
    assert raced == [stage >= 3 - pending for stage in range(3)]


def test_a_copy_that_was_not_committed_is_not_waited_for(races):
    copy(races)
    races.wait_copies(0, ALL)
    races.read(0, LANE_WARPS, LANES, 16, READ)
    assert kinds(races) == [("write-read", COPY, READ, False)]


def test_a_copy_over_what_others_still_read_races(races):
    read(races)
    copy(races)
    assert kinds(races) == [("read-write", READ, COPY, False)]


def test_a_store_over_a_copy_in_flight_races(races):
    copy(races)
    races.commit_copies(0, ALL)
    races.write(0, LANE_WARPS, LANES, 16, STORE)
    assert kinds(races) == [("write-write", COPY, STORE, False)]


@pytest.mark.parametrize("arrives", [True, False])
def test_copies_that_arrive_at_an_mbarrier_are_known_to_who_waits(races, arrives):
    copy(races)
    if arrives:
        races.signal_copies(0, ALL, FULL)
    races.complete(0, FULL)
    races.wait(0, ALL, FULL)
    read(races)
    assert bool(races.found) is not arrives


@pytest.mark.parametrize("fenced", [True, False])
def test_wgmma_reads_a_copy_only_after_a_proxy_fence(races, fenced):
    copy(races)
    races.commit_copies(0, ALL)
    races.wait_copies(0, ALL)
    if fenced:
        races.fence_proxy_async(0, ALL)
    races.barrier(0, ALL)
    multiply(races)
    assert kinds(races) == ([] if fenced else [("write-read", COPY, MMA, True)])


# The proxies


@pytest.mark.parametrize("operation", [multiply, save])
@pytest.mark.parametrize("fence", ["before the barrier", "after it", "too early", None])
def test_the_async_proxy_sees_a_store_only_after_a_proxy_fence(races, operation, fence):
    if fence == "too early":
        races.fence_proxy_async(0, ALL)
    store(races)
    if fence == "before the barrier":
        races.fence_proxy_async(0, ALL)
    races.barrier(0, ALL)
    if fence == "after it":
        races.fence_proxy_async(0, ALL)
    transfer = operation(races)
    ordered = fence in ("before the barrier", "after it")
    instruction = MMA if transfer.actor == 4 else SAVE
    assert kinds(races) == ([] if ordered else [("write-read", STORE, instruction, True)])
    assert ordered or describe(races.found[0], str).endswith("with no fence.proxy.async between")


def test_every_warp_that_stored_has_to_fence(races):
    store(races)
    races.fence_proxy_async(0, np.array([0, 1, 2]))
    races.barrier(0, ALL)
    multiply(races)
    assert [(race.first_actor, race.proxy) for race in races.found] == [("warp 3", True)]


def test_a_fence_without_a_barrier_does_not_order_other_warps(races):
    store(races)
    races.fence_proxy_async(0, ALL)
    save(races)
    assert [race.proxy for race in races.found] == [False]


def test_wgmma_is_issued_by_every_warp_of_its_group(races):
    races.write(0, np.full(32, 0), np.arange(32) * 4, 4, STORE)
    races.fence_proxy_async(0, 0)
    races.barrier(0, np.array([0, 1, 2]))
    multiply(races)
    assert kinds(races) == [("write-read", STORE, MMA, False)]


def test_a_load_over_what_was_read_needs_no_proxy_fence_but_an_order(races):
    read(races)
    races.barrier(0, ALL)
    load(races)
    assert races.found == []


def test_a_load_over_what_is_still_read_races(races):
    read(races)
    load(races)
    assert kinds(races) == [("read-write", READ, TMA, False)]


@pytest.mark.parametrize("fenced", [True, False])
def test_a_load_over_what_was_stored_needs_a_proxy_fence(races, fenced):
    store(races)
    if fenced:
        races.fence_proxy_async(0, ALL)
    races.barrier(0, ALL)
    load(races)
    assert kinds(races) == ([] if fenced else [("write-write", STORE, TMA, True)])


# Loads, wgmma and bulk stores in flight


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_is_read_by_whoever_waited_for_its_mbarrier(races, waits):
    load(races)
    races.wait(0, ALL if waits else np.array([0, 1]), FULL)
    read(races)
    assert bool(races.found) is not waits
    assert all(race.first_actor == "a TMA load" for race in races.found)


@pytest.mark.parametrize("waits", [True, False])
def test_wgmma_reads_a_load_without_a_proxy_fence(races, waits):
    load(races)
    if waits:
        races.wait(0, ALL, FULL)
    multiply(races)
    assert kinds(races) == ([] if waits else [("write-read", TMA, MMA, False)])


def test_the_issuer_of_a_load_has_to_wait_too(races):
    load(races)
    races.read(0, np.full(32, 0), np.arange(32) * 4, 4, READ)
    assert kinds(races) == [("write-read", TMA, READ, False)]


def test_a_load_that_did_not_arrive_is_in_flight(races):
    transfer = races.begin_async(0, 0, LOAD)
    races.async_write(transfer, TILE, 1024, TMA)
    races.barrier(0, ALL)
    read(races)
    assert kinds(races) == [("write-read", TMA, READ, False)]


@pytest.mark.parametrize("operation", [multiply, save])
@pytest.mark.parametrize("waits", [True, False])
def test_the_source_of_an_operation_in_flight_may_not_be_written(races, operation, waits):
    transfer = operation(races)
    if waits:
        races.acquire_async(0, ALL if operation is multiply else 0, transfer)
    races.barrier(0, ALL)
    store(races)
    assert len(races.found) == (0 if waits else 1)
    assert all(race.kind == "read-write" for race in races.found)


def test_a_wait_for_a_group_covers_the_groups_before_it_and_not_the_later(races):
    first, second = multiply(races, 0), multiply(races, 1)
    third = multiply(races, 2)
    races.acquire_async(0, ALL, second)
    load(races, 0)
    load(races, 1)
    assert races.found == []
    load(races, 2)
    assert kinds(races) == [("read-write", MMA, TMA, False)]
    assert first.actor == second.actor == third.actor


def test_wgmma_that_is_waited_for_does_not_cover_a_bulk_store(races):
    transfer = save(races)
    races.acquire_async(0, ALL, multiply(races, 1))
    races.barrier(0, ALL)
    store(races)
    assert kinds(races) == [("read-write", SAVE, STORE, False)]
    assert transfer.actor == 8


def test_numbers_of_loads_are_used_again():
    races = SharedRaces(1, 4, SIZE, async_slots=3)
    actors = []
    for turn in range(10):
        actors.append(load(races, turn % 2).actor)
        races.wait(0, ALL, FULL + 8 * (turn % 2))
        multiplied = multiply(races, turn % 2)
        races.acquire_async(0, ALL, multiplied)
        races.barrier(0, ALL)
    assert races.found == []
    assert actors == [16 + turn % 3 for turn in range(10)]
    load(races)  # with a number that was waited for before
    read(races)
    assert kinds(races) == [("write-read", TMA, READ, False)]


def test_what_its_issuer_does_later_is_not_ordered_before_an_operation(races):
    transfer = races.begin_async(0, 0, LOAD)
    races.write(0, np.full(32, 0), np.arange(32) * 4, 4, STORE)
    races.fence_proxy_async(0, 0)
    races.async_write(transfer, TILE, 1024, TMA)
    assert kinds(races) == [("write-write", STORE, TMA, False)]


def test_an_operation_does_not_race_with_itself(races):
    transfer = races.begin_async(0, 0, LOAD)
    races.async_write(transfer, TILE, 1024, TMA)
    races.async_write(transfer, TILE, 1024, TMA)
    assert races.found == []


def test_a_load_that_was_acquired_is_known_in_both_proxies(races):
    transfer = races.begin_async(0, 0, LOAD)
    races.async_write(transfer, TILE, 1024, TMA)
    races.acquire_async(0, ALL, transfer)
    multiply(races)
    assert races.found == []


def test_copies_of_two_warps_to_one_place_race_in_one_instruction(races):
    races.copy_async(0, LANE_WARPS, LANES % 1024, 16, COPY)
    assert [(race.kind, race.count) for race in races.found] == [("write-write", 64)]
