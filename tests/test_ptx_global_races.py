"""Races between CTAs on global memory, in both orders of running them."""

import numpy as np
import pytest

from rooflab.bench.ptx.races.global_races import GlobalRaces
from rooflab.bench.ptx.races.reports import describe

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


def test_ctas_that_write_their_own_tiles_do_not_race(races):
    for cta in range(8):
        races.write(lanes(cta), tile(OUT, cta), 4, STORE)
        races.read(lanes(cta), tile(OUT, cta), 4, READ)
        races.write(lanes(cta), tile(OUT, cta), 4, STORE)
    assert races.found == []


def test_two_ctas_that_write_one_tile_race(races):
    races.write(lanes(2), tile(OUT), 4, STORE)
    races.write(lanes(5), tile(OUT), 4, STORE)
    (race,) = races.found
    assert (race.kind, race.first_actor, race.second_actor, race.address, race.count) == (
        "write-write", "CTA 2", "CTA 5", OUT, 128,
    )  # fmt: skip
    assert describe(race, {1: "line 7 (st.global)"}.get) == (
        f"write-write race on global memory at {OUT:#x}: line 7 (st.global) wrote it in CTA 2, and "
        "line 7 (st.global) wrote it in CTA 5, with nothing that orders them between"
    )


@pytest.mark.parametrize("first", ["read", "write"])
def test_a_read_and_a_write_of_two_ctas_race_in_either_order(races, first):
    second = "write" if first == "read" else "read"
    getattr(races, first)(lanes(0), tile(OUT), 4, STORE)
    getattr(races, second)(lanes(1), tile(OUT), 4, READ)
    assert kinds(races) == [(f"{first}-{second}", STORE, READ)]


def test_many_ctas_may_read_one_tile(races):
    for cta in range(8):
        races.read(lanes(cta), tile(OUT), 4, READ)
    races.read(np.arange(128) % 8, np.full(128, OUT), 4, READ)
    assert races.found == []


@pytest.mark.parametrize("reader", range(4))
def test_a_write_races_with_any_of_several_readers(races, reader):
    for cta in range(4):
        races.read(lanes(cta), tile(OUT), 4, READ)
        if cta != reader:
            races.synchronise(cta, COUNTER, release=True)
    races.synchronise(7, COUNTER, acquire=True)
    races.write(lanes(7), tile(OUT), 4, STORE)
    assert [(race.kind, race.first_actor) for race in races.found] == [("read-write", f"CTA {reader}")]


def test_readers_of_one_instruction_all_count(races):
    races.read(np.repeat(np.arange(4), 32), OUT + np.arange(128) % 32 * 4, 4, READ)
    for cta in (1, 2, 3):
        races.synchronise(cta, COUNTER, release=True)
    races.synchronise(7, COUNTER, acquire=True)
    races.write(lanes(7)[:32], tile(OUT)[:32], 4, STORE)
    assert [(race.kind, race.first_actor, race.count) for race in races.found] == [("read-write", "CTA 0", 32)]


def test_readers_whose_sets_differ_by_granule_are_told_apart(races):
    races.read(lanes(0), tile(OUT), 4, READ)
    races.read(lanes(1)[:64], tile(OUT)[:64], 4, READ)
    races.read(lanes(2), tile(OUT), 4, READ)
    races.synchronise(0, COUNTER, release=True)
    races.synchronise(2, COUNTER, release=True)
    races.synchronise(7, COUNTER, acquire=True)
    races.write(lanes(7), tile(OUT), 4, STORE)
    assert [(race.first_actor, race.count) for race in races.found] == [("CTA 1", 64)]


def test_atomics_of_ctas_do_not_race_with_each_other(races):
    for cta in range(8):
        races.atomic(lanes(cta), tile(OUT), 4, ATOMIC)
    races.atomic(np.arange(128) % 8, np.full(128, COUNTER), 4, ATOMIC)
    assert races.found == []


@pytest.mark.parametrize(("access", "kind"), [("read", "write-read"), ("write", "write-write")])
def test_what_is_no_atomic_races_with_one(races, access, kind):
    races.atomic(lanes(0), tile(OUT), 4, ATOMIC)
    races.atomic(lanes(1), tile(OUT), 4, ATOMIC)
    getattr(races, access)(lanes(1), tile(OUT), 4, STORE)
    assert kinds(races) == [(kind, ATOMIC, STORE)]
    assert races.found[0].first_actor == "CTA 0"


@pytest.mark.parametrize(("access", "kind"), [("read", "read-write"), ("write", "write-write")])
def test_an_atomic_races_with_what_is_none(races, access, kind):
    getattr(races, access)(lanes(0), tile(OUT), 4, STORE)
    races.atomic(lanes(1), tile(OUT), 4, ATOMIC)
    assert kinds(races) == [(kind, STORE, ATOMIC)]


# Synchronisation: a split reduction in which the last CTA to arrive sums up


def split_reduction(races, order, releases=True, acquires=True, fences=True):
    for place, cta in enumerate(order):
        races.write(lanes(cta), tile(PARTIAL, cta), 4, STORE)
        if fences and releases:
            races.fence(cta)
        races.atomic(np.array([cta]), np.array([COUNTER]), 4, ATOMIC)
        races.synchronise(cta, COUNTER, release=releases and not fences, acquire=acquires and not fences)
        if place < len(order) - 1:
            continue
        if fences and acquires:
            races.fence(cta)
        for other in order:
            races.read(lanes(cta), tile(PARTIAL, other), 4, READ)
        races.write(lanes(cta), tile(OUT), 4, SUM)


@pytest.mark.parametrize("fences", [True, False])
def test_a_split_reduction_with_release_and_acquire_is_right(races, fences):
    split_reduction(races, (3, 0, 2, 1), fences=fences)
    assert races.found == []


@pytest.mark.parametrize("fences", [True, False])
@pytest.mark.parametrize("missing", ["releases", "acquires"])
def test_a_split_reduction_without_one_of_them_is_reported(races, missing, fences):
    split_reduction(races, (3, 0, 2, 1), fences=fences, **{missing: False})
    assert kinds(races) == [("write-read", STORE, READ)]
    assert races.found[0].count == 3 * 128


def test_one_cta_that_does_not_release_is_enough(races):
    for cta in (0, 1, 2):
        races.write(lanes(cta), tile(PARTIAL, cta), 4, STORE)
        races.synchronise(cta, COUNTER, release=cta != 1)
    races.synchronise(3, COUNTER, acquire=True)
    for cta in (0, 1, 2):
        races.read(lanes(3), tile(PARTIAL, cta), 4, READ)
    assert [(race.first_actor, race.count) for race in races.found] == [("CTA 1", 128)]


def test_a_fence_does_not_release_what_is_done_after_it(races):
    races.fence(0)
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.synchronise(0, COUNTER)
    races.synchronise(1, COUNTER, acquire=True)
    races.read(lanes(1), tile(PARTIAL), 4, READ)
    assert kinds(races) == [("write-read", STORE, READ)]


def test_a_release_does_not_cover_what_is_done_after_it(races):
    races.synchronise(0, COUNTER, release=True)
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.synchronise(1, COUNTER, acquire=True)
    races.read(lanes(1), tile(PARTIAL), 4, READ)
    assert kinds(races) == [("write-read", STORE, READ)]


def test_another_address_orders_nothing(races):
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.synchronise(0, COUNTER, release=True)
    races.synchronise(1, COUNTER + 4, acquire=True)
    races.read(lanes(1), tile(PARTIAL), 4, READ)
    assert kinds(races) == [("write-read", STORE, READ)]


def test_what_a_cta_learnt_it_passes_on(races):
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.synchronise(0, COUNTER, release=True)
    races.synchronise(1, COUNTER, release=True, acquire=True)
    races.synchronise(1, OUT, release=True)
    races.synchronise(2, OUT, acquire=True)
    races.read(lanes(2), tile(PARTIAL), 4, READ)
    assert races.found == []


def test_a_cta_is_ordered_with_itself_across_its_releases(races):
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.read(lanes(0), tile(PARTIAL), 4, READ)
    races.synchronise(0, COUNTER, release=True)
    races.fence(0)
    races.write(lanes(0), tile(PARTIAL), 4, STORE)
    races.read(lanes(0), tile(PARTIAL), 4, READ)
    assert races.found == []


@pytest.mark.parametrize("other", ["read", "atomic", "poll"])
def test_a_load_that_polls_races_with_no_read_and_no_atomic(races, other):
    for first, second in ((other, "poll"), ("poll", other)):
        getattr(races, first)(lanes(0), tile(OUT), 4, READ)
        getattr(races, second)(lanes(1), tile(OUT), 4, ATOMIC)
    assert races.found == []


def test_a_load_that_polls_races_with_a_plain_write_in_either_order(races):
    races.poll(lanes(0), tile(OUT), 4, READ)
    races.write(lanes(1), tile(OUT), 4, STORE)
    races.poll(lanes(2), tile(OUT), 4, READ)
    assert kinds(races) == [("read-write", READ, STORE), ("write-read", STORE, READ)]


def test_what_only_loads_a_flag_releases_nothing_to_it(races):
    races.write(lanes(0), tile(OUT), 4, STORE)
    races.fence(0)
    races.synchronise(0, COUNTER, stores=False)
    races.synchronise(1, COUNTER, acquire=True, stores=False)
    races.read(lanes(1), tile(OUT), 4, READ)
    assert kinds(races) == [("write-read", STORE, READ)]
