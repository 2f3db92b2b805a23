"""Races on shared memory between warps: barriers, signals, slots, granules, and what is reported."""

import numpy as np
import pytest
from ptx_race_moves import (
    ALL,
    COPY,
    EMPTY,
    FULL,
    LANE_WARPS,
    LANES,
    READ,
    SIZE,
    STORE,
    USE,
    kinds,
    load,
)

from rooflab.bench.ptx.races.reports import describe
from rooflab.bench.ptx.races.shared_races import SharedRaces


@pytest.fixture
def races():
    return SharedRaces(1, 4, SIZE)


def own(warp):
    """Lanes of one warp."""
    return np.full(32, warp)


def store(races, slot=0):
    races.write(slot, LANE_WARPS, slot * SIZE + LANES, 16, STORE)


def read_reversed(races, slot=0):
    """Every warp reads what another one stored."""
    races.read(slot, LANE_WARPS, slot * SIZE + LANES[::-1], 16, READ)


# Warps and barriers


def test_a_barrier_orders_a_store_before_a_read(races):
    store(races)
    races.barrier(0, ALL)
    read_reversed(races)
    assert races.found == []


def test_a_missing_barrier_is_a_write_read_race(races):
    store(races)
    read_reversed(races)
    (race,) = races.found
    assert (race.kind, race.first, race.second, race.proxy) == ("write-read", STORE, READ, False)
    assert {race.first_actor, race.second_actor} <= {f"warp {warp}" for warp in range(4)}
    assert race.first_actor != race.second_actor
    assert race.count == 512


def test_a_warp_is_ordered_with_itself(races):
    store(races)
    races.read(0, LANE_WARPS, LANES, 16, READ)
    store(races)
    assert races.found == []


def test_a_read_races_with_a_later_store_unless_a_barrier_is_between(races):
    read_reversed(races)
    races.barrier(0, ALL)
    store(races)
    assert races.found == []
    read_reversed(races)  # one more, and no barrier before the next store
    found = len(races.found)
    store(races)
    assert kinds(races)[found:] == [("read-write", READ, STORE, False)]


def test_every_reader_counts_and_not_only_the_last(races):
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    races.read(0, own(2), np.arange(32) * 4, 4, USE)
    races.signal(0, 2, "a")
    races.complete(0, "a")
    races.wait(0, 3, "a")
    races.write(0, own(3), np.arange(32) * 4, 4, STORE)
    assert kinds(races) == [("read-write", READ, STORE, False)]


def test_a_barrier_of_some_warps_orders_only_these(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.barrier(0, np.array([0, 1]))
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    assert races.found == []
    races.read(0, own(2), np.arange(32) * 4, 4, USE)
    assert kinds(races) == [("write-read", STORE, USE, False)]


def test_a_barrier_orders_nothing_that_comes_after_it(races):
    races.barrier(0, ALL)
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    assert kinds(races) == [("write-read", STORE, READ, False)]


def test_what_a_warp_learnt_it_passes_on(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.barrier(0, np.array([0, 1]))
    races.barrier(0, np.array([1, 2]))
    races.read(0, own(2), np.arange(32) * 4, 4, READ)
    assert races.found == []


def test_a_named_barrier_is_a_release_of_those_who_arrive_to_those_who_wait(races):
    for arrives in (True, False):
        races.write(0, own(0), np.arange(32) * 4, 4, STORE)
        if arrives:
            races.signal(0, 0, ("bar", 1))
        races.signal(0, 1, ("bar", 1))
        races.complete(0, ("bar", 1))
        races.wait(0, 1, ("bar", 1))
        races.read(0, own(1), np.arange(32) * 4, 4, READ)
        assert bool(races.found) is not arrives
        if arrives:
            races.barrier(0, ALL)
    assert kinds(races) == [("write-read", STORE, READ, False)]


def test_who_arrives_learns_nothing(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.signal(0, np.array([0, 1]), ("bar", 1))
    races.complete(0, ("bar", 1))
    races.wait(0, 0, ("bar", 1))
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    assert kinds(races) == [("write-read", STORE, READ, False)]


def test_a_wait_for_one_phase_learns_nothing_of_the_next(races):
    races.signal(0, 0, FULL)
    races.complete(0, FULL)
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.signal(0, 0, FULL)
    races.wait(0, 1, FULL)
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    assert kinds(races) == [("write-read", STORE, READ, False)]


def test_partial_overlap_is_found_at_the_granule(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    races.read(0, own(1), 128 + np.arange(32) * 16, 16, READ)
    assert races.found == []
    races.read(0, own(1)[:1], np.array([112]), 16, READ)
    assert [(race.kind, race.address, race.count) for race in races.found] == [("write-read", 112, 4)]


# Slots, granules and limits


def test_slots_know_nothing_of_each_other():
    races = SharedRaces(3, 4, SIZE)
    store(races, slot=1)
    races.barrier(2, ALL)
    read_reversed(races, slot=2)
    assert races.found == []
    read_reversed(races, slot=1)
    assert [race.slot for race in races.found] == [1]


def test_a_barrier_of_several_slots_works_in_each():
    races = SharedRaces(3, 4, SIZE)
    for slot in range(3):
        store(races, slot=slot)
    races.barrier(np.array([0, 2]), ALL)
    for slot in (0, 2):
        read_reversed(races, slot=slot)
    assert races.found == []
    read_reversed(races, slot=1)
    assert [race.slot for race in races.found] == [1]


def test_a_new_cta_in_a_slot_is_ordered_after_the_old_one(races):
    store(races)
    transfer = load(races, 1)
    races.signal_async(transfer, EMPTY)
    races.copy_async(0, LANE_WARPS, 4096 + LANES, 16, COPY)
    races.restart(0)
    read_reversed(races)
    races.read(0, LANE_WARPS, 2048 + LANES, 16, READ)
    races.read(0, LANE_WARPS, 4096 + LANES, 16, READ)
    assert races.found == []
    assert races.unwaited(0, 0, EMPTY) == []


def test_reports_are_counted_and_capped():
    races = SharedRaces(1, 2, SIZE, limit=2)
    for instruction in range(10, 14):
        races.write(0, np.array([0]), np.array([0]), 4, STORE)
        races.read(0, np.array([1]), np.array([0]), 4, instruction)
        races.barrier(0, np.arange(2))
    assert len(races.found) == 2
    assert races.findings.dropped == 2
    races.write(0, np.array([0]), np.array([0]), 4, STORE)
    races.read(0, np.array([1]), np.array([0]), 4, 10)
    assert [race.count for race in races.found] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, 4, 1000), "size: expected a positive multiple of 1024"),
        ((1, 4, 1024, 3), "granule_bytes: expected 1, 2, 4, 8 or 16, got 3"),
        ((1, 1010, 1024), "4 \\* warps"),
        ((0, 4, 1024), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        SharedRaces(*arguments)


def test_an_operation_of_an_unknown_kind_is_refused(races):
    with pytest.raises(ValueError, match="kind: expected 'load', 'wgmma' or 'bulk', got 'tma'"):
        races.begin_async(0, 0, "tma")


def test_a_report_says_who_did_what_where(races):
    store(races)
    read_reversed(races)
    text = describe(races.found[0], {STORE: "line 3 (st.shared)", READ: "line 9 (ld.shared)"}.get)
    assert text.startswith("write-read race on shared memory at 0x")
    assert "line 3 (st.shared) wrote it in warp" in text
    assert "line 9 (ld.shared) read it in warp" in text
    assert text.endswith("with nothing that orders them between")


def test_the_parts_are_named(races):
    assert [races.name_of(actor) for actor in (3, 4, 9, 14, 16, 79)] == [
        "warp 3", "wgmma of warp 0", "a bulk store of warp 1", "cp.async of warp 2", "a TMA load", "a TMA load",
    ]  # fmt: skip


@pytest.mark.parametrize("granule", [1, 2, 4])
def test_neighbours_of_the_granule_are_told_apart(granule):
    races = SharedRaces(1, 2, SIZE, granule)
    for warp in range(2):
        races.write(0, np.array([warp]), np.array([warp * granule]), granule, STORE)
    assert races.found == []
    races.read(0, np.array([1]), np.array([0]), granule, READ)
    assert [(race.address, race.count) for race in races.found] == [(0, 1)]


def test_stores_of_one_value_by_several_warps_do_not_keep_out_a_race():
    races = SharedRaces(1, 2, SIZE, limit=2)
    warps, places = np.repeat([0, 1], 32), np.tile(np.arange(32) * 4, 2)
    for instruction in range(5):
        races.write(0, warps, places, 4, instruction, np.zeros(64, np.uint32))
        races.barrier(0, np.arange(2))
    races.read(0, warps[:32], places[:32], 4, 5)
    races.write(0, warps[32:], places[:32], 4, 6)
    assert sum(race.harmless for race in races.found) == 5
    assert [(race.kind, race.first, race.second) for race in races.found if not race.harmless] == [("read-write", 5, 6)]
