"""Races on global memory: CTAs in one instruction, equal values, granules and allocations."""

import numpy as np
import pytest

from rooflab.bench.ptx.races.global_races import GlobalRaces

BASE = 0x7F00_0000_1000
OUT, PARTIAL, COUNTER = BASE, BASE + 0x10000, BASE + 0x20000
STORE, READ, ATOMIC, SUM = 1, 2, 3, 4


@pytest.fixture
def races():
    found = GlobalRaces(8)
    for base, size in ((PARTIAL, 4096), (OUT, 4096), (COUNTER, 4)):
        found.add(base, size)
    return found


def lanes(cta):
    return np.full(128, cta)


def tile(base, number=0):
    return base + 512 * number + np.arange(128) * 4


def kinds(races):
    return [(race.kind, race.first, race.second) for race in races.found]


def test_ctas_that_write_one_granule_in_one_instruction_race(races):
    ctas = np.repeat(np.arange(4), 32)
    addresses = OUT + np.arange(128) % 64 * 4
    races.write(ctas, addresses, 4, STORE)
    assert [(race.kind, race.count, race.same_value) for race in races.found] == [("write-write", 64, False)]


def test_equal_values_in_one_instruction_are_marked(races):
    ctas = np.repeat(np.arange(2), 32)
    values = np.arange(64, dtype=np.float32) % 32
    values[3] = 77
    races.write(ctas, OUT + np.arange(64) % 32 * 4, 4, STORE, [values])
    assert sorted((race.same_value, race.count) for race in races.found) == [(False, 1), (True, 31)]


def test_a_store_of_what_was_there_is_marked(races):
    races.write(lanes(0), tile(OUT), 4, STORE)
    old = np.arange(128, dtype=np.uint32)
    new = old.copy()
    new[3] = 0
    races.write(lanes(1), tile(OUT), 4, SUM, [new], lambda: [old])
    assert sorted((race.same_value, race.count) for race in races.found) == [(False, 1), (True, 127)]


def test_what_was_there_is_not_looked_up_without_a_race(races):
    races.write(lanes(0), tile(OUT), 4, STORE, [np.uint32(1)], lambda: pytest.fail("looked up"))
    races.write(lanes(0), tile(OUT), 4, STORE, [np.uint32(1)], lambda: pytest.fail("looked up"))
    assert races.found == []


def test_wide_accesses_are_looked_at_granule_by_granule(races):
    races.write(np.array([0]), np.array([OUT + 12]), 4, STORE)
    races.read(np.array([1]), np.array([OUT + 16]), 16, READ)
    assert races.found == []
    races.read(np.array([1]), np.array([OUT]), 16, READ)
    assert [(race.address, race.count) for race in races.found] == [(OUT + 12, 1)]


def test_a_granule_of_one_byte_tells_neighbours_apart():
    races = GlobalRaces(2, granule_bytes=1)
    races.add(BASE + 3, 10)
    races.write(np.array([0]), np.array([BASE + 3]), 1, STORE)
    races.write(np.array([1]), np.array([BASE + 4]), 1, STORE)
    assert races.found == []
    races.write(np.array([1]), np.array([BASE + 3]), 1, STORE)
    assert [race.address for race in races.found] == [BASE + 3]


def test_every_allocation_has_its_own_shadow(races):
    last = np.array([PARTIAL + 4092, OUT, OUT + 4092, COUNTER])
    races.write(np.zeros(4, np.int64), last, 4, STORE)
    for address in last:
        races.write(np.array([1]), np.array([address]), 4, SUM)
    assert races.found[0].count == 4
    assert races.found[0].address == PARTIAL + 4092
    assert kinds(races) == [("write-write", STORE, SUM)]


def test_a_new_grid_starts_with_nothing(races):
    races.write(lanes(0), tile(OUT), 4, STORE)
    races.restart()
    races.write(lanes(1), tile(OUT), 4, STORE)
    assert races.found == []


def test_many_ctas_and_epochs_work():
    races = GlobalRaces(3000)
    races.add(BASE, 4096)
    for cta in range(3000):
        races.read(np.array([cta]), np.array([BASE]), 4, READ)
        races.synchronise(cta, COUNTER, release=cta != 1234)
    races.synchronise(7, COUNTER, acquire=True)
    races.write(np.array([7]), np.array([BASE]), 4, STORE)
    assert [race.first_actor for race in races.found] == ["CTA 1234"]


@pytest.mark.parametrize("case", ["granule", "ctas", "empty"])
def test_what_cannot_be_is_refused(races, case):
    calls = {
        "granule": (lambda: GlobalRaces(1, 3), "granule_bytes: expected 1, 2, 4, 8 or 16, got 3"),
        "ctas": (lambda: GlobalRaces(0), "ctas: expected at least 1, got 0"),
        "empty": (lambda: races.add(BASE - 4096, 0), "size: expected at least 1 byte, got 0"),
    }
    call, text = calls[case]
    with pytest.raises(ValueError, match=text):
        call()


def test_allocations_that_overlap_are_one():
    races = GlobalRaces(2)
    for base, size in ((BASE + 64, 64), (BASE + 512, 64), (BASE, 100), (BASE + 120, 4), (BASE + 86, 8)):
        races.add(base, size)
    for cta in range(2):
        races.write(np.full(4, cta), BASE + np.array([0, 96, 124, 512]), 4, STORE)
    assert [(race.address, race.count) for race in races.found] == [(BASE, 4)]
    races.write(np.array([0]), np.array([BASE + 80]), 16, STORE)
    races.read(np.array([1]), np.array([BASE + 88]), 4, READ)
    assert [(race.kind, race.address) for race in races.found[1:]] == [("write-read", BASE + 88)]
