"""Races on shared memory between lanes of one instruction, equal values, several slots, and atomics."""

import numpy as np
import pytest
from ptx_race_moves import ALL, LANE_WARPS, READ, SAVE, SIZE, STORE, USE, kinds

from rooflab.bench.ptx.races.reports import describe
from rooflab.bench.ptx.races.shared_races import SharedRaces


@pytest.fixture
def races():
    return SharedRaces(1, 4, SIZE)


def own(warp):
    """Lanes of one warp."""
    return np.full(32, warp)


# Lanes and values


def test_two_warps_that_store_to_one_place_in_one_instruction_race(races):
    addresses = np.arange(128) % 64 * 4
    races.write(0, LANE_WARPS, addresses, 4, STORE)
    assert [(race.kind, race.same_value, race.count) for race in races.found] == [("write-write", False, 64)]


def test_two_warps_that_store_the_same_values_are_marked(races):
    addresses = np.arange(128) % 64 * 4
    races.write(0, LANE_WARPS, addresses, 4, STORE, [(np.arange(128) % 64).astype(np.float32), np.float32("nan")])
    assert [(race.kind, race.same_value) for race in races.found] == [("write-write", True)]
    assert describe(races.found[0], str).endswith("; both leave the same value")


def test_lanes_of_one_warp_race_only_with_different_values(races):
    same = np.zeros(32, np.int64)
    races.write(0, own(0), same, 4, STORE)
    races.write(0, own(0), same, 4, STORE, [np.uint32(7)])
    races.write(0, own(0), same, 4, STORE, [np.full(32, 7, np.uint32)])
    assert races.found == []
    races.write(0, own(0), same, 4, STORE, [np.arange(32, dtype=np.uint32)])
    assert [(race.kind, race.count) for race in races.found] == [("lanes", 31)]
    assert "lanes of one warp write different values" in describe(races.found[0], str)


def test_a_store_of_what_was_there_is_marked_lane_by_lane(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE)
    old = np.arange(32, dtype=np.uint32)
    new = old.copy()
    new[5] = 99
    races.write(0, own(1), np.arange(32) * 4, 4, SAVE, [new], lambda: [old])
    assert sorted((race.same_value, race.count) for race in races.found) == [(False, 1), (True, 31)]


def test_what_was_there_is_not_looked_up_without_a_race(races):
    races.write(0, own(0), np.arange(32) * 4, 4, STORE, [np.uint32(1)], lambda: pytest.fail("looked up"))
    assert races.found == []


def test_one_address_and_lanes_of_several_slots_work():
    races = SharedRaces(2, 2, SIZE)
    slots, warps = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    races.read(0, np.array([0, 1]), np.array(16), 4, READ)
    races.write(slots, warps, slots * SIZE + np.array([64, 128, 64, 128]), 4, STORE)
    assert races.found == []
    races.write(np.array([1]), np.array([0]), np.array([SIZE + 128]), 4, SAVE)
    assert [(race.slot, race.address) for race in races.found] == [(1, 128)]
    assert "(CTA 1)" in describe(races.found[0], str)


# Atomics


def test_atomics_do_not_race_with_each_other(races):
    for warp in range(4):
        races.atomic(0, own(warp), np.arange(32) * 4, 4, USE)
    assert races.found == []


def test_a_read_races_with_any_atomic_before_it_and_not_only_the_last(races):
    races.atomic(0, own(0), np.arange(32) * 4, 4, USE)
    races.atomic(0, own(1), np.arange(32) * 4, 4, USE)
    races.read(0, own(1), np.arange(32) * 4, 4, READ)
    assert kinds(races) == [("write-read", USE, READ, False)]
    assert races.found[0].first_actor == "warp 0"


@pytest.mark.parametrize("access", ["read", "write"])
def test_an_atomic_races_with_what_is_none_unless_a_barrier_is_between(races, access):
    for expected in ([], [("read-write" if access == "read" else "write-write", READ, USE, False)]):
        getattr(races, access)(0, own(0), np.arange(32) * 4, 4, READ)
        if not expected:
            races.barrier(0, ALL)
        races.atomic(0, own(1), np.arange(32) * 4, 4, USE)
        races.barrier(0, ALL)
        assert kinds(races) == expected


def test_a_store_races_with_an_atomic_before_it(races):
    races.atomic(0, own(0), np.arange(32) * 4, 4, USE)
    races.write(0, own(1), np.arange(32) * 4, 4, STORE)
    assert kinds(races) == [("write-write", USE, STORE, False)]


@pytest.mark.parametrize("dtype", ["?", "u1", "f2", "f4", "u8", "c16"])
def test_values_of_every_width_are_compared_bit_by_bit(dtype):
    values = np.array([0, 1, 1, 1]).astype(dtype)
    size = values.itemsize
    races = SharedRaces(1, 4, SIZE, granule_bytes=min(size, 4))
    races.write(0, np.zeros(4, np.int64), np.zeros(4, np.int64), size, STORE, values)
    assert [(race.kind, race.count) for race in races.found] == [("lanes", 1)]
    races.write(0, np.zeros(4, np.int64), np.zeros(4, np.int64), size, STORE, values[2])
    assert len(races.found) == 1
    imaginary = np.zeros(4, "c16")
    imaginary.imag = [1, 2, 2, 2]
    races.write(0, np.zeros(4, np.int64), np.zeros(4, np.int64), 16, SAVE, imaginary)
    assert [race.count for race in races.found] == [1, 1]
