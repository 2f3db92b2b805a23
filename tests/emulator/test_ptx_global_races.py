"""Races between CTAs on global memory, in programs of a few moves, and what the warps of a CTA release and learn."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rooflab.bench.emulator.races.global_races import GlobalRaces
from rooflab.bench.emulator.races.granules import Granules
from rooflab.bench.emulator.races.reports import describe
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import MapOrder, VectorClocks

BASE = 0x7F00_0000_1000
OUT, PARTIAL, COUNTER = BASE, BASE + 0x10000, BASE + 0x20000
NAMES = ["", "write", "read", "atomic", "poll"]
WRITE, READ, ATOMIC, POLL = range(1, 5)
WARPS = 4
ALL = np.arange(WARPS)


def lanes(cta: int) -> np.ndarray:
    return np.full(128, cta)


def tile(base: int, number: int = 0) -> np.ndarray:
    return base + 512 * number + np.arange(128) * 4


GRANULES = Granules(4, ((PARTIAL, 4096), (OUT, 4096), (COUNTER, 4)))


@pytest.fixture
def races() -> GlobalRaces:
    """Of eight CTAs, in three allocations."""
    return GlobalRaces(8, GRANULES)


def kinds(races: GlobalRaces) -> list[str]:
    return [f"{race.kind} {NAMES[race.first]} {NAMES[race.second]}" for race in races.found]


def run(races: GlobalRaces, words: str) -> list[str]:
    """Moves, each a word: `read@3/1` is done by CTA 3 to tile 1, `release@3/1` to flag 1; without a number to 0.

    `look` and `gets` are loads of a flag, `gets` with acquire.  What else there is, `test_ptx_race_model.py` draws.
    """
    orders = {
        "release": {"release": True},
        "acquire": {"acquire": True},
        "look": {"stores": False},
        "gets": {"acquire": True, "stores": False},
    }
    for word in words.split():
        name, cta, number = re.fullmatch(r"(\w+)@(\d)(?:/(\d))?", word).groups()
        if name in orders:
            races.synchronise(int(cta), COUNTER + 4 * int(number or 0), **orders[name])
        elif name.endswith("fence"):
            getattr(races, name)(int(cta))
        else:
            getattr(races, name)(lanes(int(cta)), tile(OUT, int(number or 0)), 4, NAMES.index(name))
    return kinds(races)


@pytest.mark.parametrize("words", ["read@0 poll@1 poll@0 read@1", "atomic@0 poll@1 poll@0 atomic@1", "poll@0 poll@1"])
def test_what_is_ordered_is_not_reported(races: GlobalRaces, words: str) -> None:
    assert run(races, words) == []


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("atomic@0 atomic@1 read@1", "write-read atomic read"),
        ("poll@0 write@1", "read-write poll write"),
        ("write@0 poll@1", "write-read write poll"),
        ("write@0 fence@0 look@0 gets@1 read@1", "write-read write read"),  # who loads a flag releases nothing to it
    ],
)
def test_what_is_not_ordered_is_reported_once(races: GlobalRaces, words: str, found: str) -> None:
    assert run(races, words) == [found]
    assert (races.found[0].first_actor, races.found[0].count) == ("CTA 0", 128)


ORDERED = "write@0 {} release@0 acquire@1 {} read@1"


@pytest.mark.parametrize(
    ("words", "by_tma", "missing"),
    [
        (ORDERED.format("", ""), {READ: True}, True),
        (ORDERED.format("", ""), {}, False),
        (ORDERED.format("", ""), {READ: True, WRITE: True}, False),
        (ORDERED.format("", ""), {READ: True, WRITE: False}, False),
        (ORDERED.format("proxy_fence@0", ""), {READ: True}, False),
        (ORDERED.format("", "proxy_fence@1"), {READ: True}, False),
        ("proxy_fence@0 " + ORDERED.format("", ""), {READ: True}, True),
        (ORDERED.format("proxy_fence@0 write@0", ""), {READ: True}, True),
        ("write@0 read@0", {READ: True}, True),
        ("write@0 proxy_fence@0 read@0", {READ: True}, False),
    ],
)
def test_tma_needs_a_proxy_fence_after_what_threads_wrote(words: str, by_tma: dict[int, bool], missing: bool) -> None:
    races = GlobalRaces(8, GRANULES, by_tma=by_tma)
    assert run(races, words) == ["write-read write read"] * missing
    assert all(race.proxy and race.rule == "missing-fence" for race in races.found)


def test_a_report_says_who_did_what_where(races: GlobalRaces) -> None:
    run(races, "write@2 write@5")
    (race,) = races.found
    assert (race.kind, race.first_actor, race.second_actor, race.address, race.count) == (
        "write-write",
        "CTA 2",
        "CTA 5",
        OUT,
        128,
    )
    assert describe(race, {1: "line 7 (st.global)"}.get) == (
        f"write-write race on global memory at {OUT:#x}: line 7 (st.global) wrote it in CTA 2, and "
        "line 7 (st.global) wrote it in CTA 5, with nothing that orders them between"
    )


def test_readers_of_one_instruction_and_of_some_granules_all_count(races: GlobalRaces) -> None:
    races.read(np.repeat(np.arange(4), 32), OUT + np.arange(128) % 32 * 4, 4, READ)
    races.read(lanes(5)[:64], tile(OUT, 1)[:64], 4, READ)
    races.read(lanes(1), tile(OUT, 1), 4, READ)
    run(races, "release@1 release@2 release@3 acquire@7 write@7 write@7/1")
    assert kinds(races) == ["read-write read write"] and races.found[0].first_actor == "CTA 0"
    assert races.found[0].count == 32 + 64


def test_ctas_of_one_instruction_race_and_equal_values_are_marked(races: GlobalRaces) -> None:
    ctas = np.repeat(np.arange(2), 32)
    values = np.where(np.arange(64) == 3, 77, np.arange(64) % 32).astype(np.float32)
    races.read(np.arange(128) % 8, np.full(128, OUT + 2048), 4, READ)
    races.atomic(np.arange(128) % 8, np.full(128, COUNTER), 4, ATOMIC)
    assert races.found == []
    races.write(ctas, OUT + np.arange(64) % 32 * 4, 4, WRITE, [values])
    assert sorted((race.same_value, race.count) for race in races.found) == [(False, 1), (True, 31)]
    races.write(np.repeat(np.arange(4), 32), PARTIAL + np.arange(128) % 64 * 4, 4, POLL)
    assert [(race.kind, race.count, race.same_value) for race in races.found[2:]] == [("write-write", 64, False)]


# Granules and allocations


def test_allocations_that_overlap_are_one() -> None:
    sizes = ((BASE + 64, 64), (BASE + 512, 64), (BASE, 100), (BASE + 120, 4), (BASE + 86, 8))
    races = GlobalRaces(2, Granules(4, sizes))
    for cta in range(2):
        races.write(np.full(4, cta), BASE + np.array([0, 96, 124, 512]), 4, WRITE)
    assert [(race.address, race.count) for race in races.found] == [(BASE, 4)]
    races.write(np.array([0]), np.array([BASE + 80]), 16, WRITE)
    races.read(np.array([1]), np.array([BASE + 88]), 4, READ)
    assert [(race.kind, race.address) for race in races.found[1:]] == [("write-read", BASE + 88)]


def test_many_ctas_and_epochs_work() -> None:
    races = GlobalRaces(3000, Granules(4, [(BASE, 4096)]))
    for cta in range(3000):
        races.read(np.array([cta]), np.array([BASE]), 4, READ)
        races.synchronise(cta, COUNTER, release=cta != 1234)
    races.synchronise(7, COUNTER, acquire=True)
    races.write(np.array([7]), np.array([BASE]), 4, WRITE)
    assert [race.first_actor for race in races.found] == ["CTA 1234"]


# The warps of a CTA


class Grid:
    """Three CTAs of four warps; a word `read@1.2` is done by warp 2 of CTA 1, `read@1` by all of its warps."""

    def __init__(self, words: str) -> None:
        tiles = ((tile(OUT, number)[0], 512) for number in range(2))
        self.races = GlobalRaces(3, Granules(4, tiles), warps=WARPS)
        self.clocks = SharedRaces(3, WARPS, 1024)
        for cta in range(3):
            self.races.attach(cta, self.clocks, cta)
        for word in words.split():
            name, cta, warp, number = re.fullmatch(r"(\w+)@(\d)(?:\.(\d))?(?:/(\d))?", word).groups()
            warps = ALL if warp is None else np.array([int(warp)])
            self.move(name, int(cta), warps, int(number or 0))

    def move(self, name: str, cta: int, warps: np.ndarray, number: int) -> None:
        actors, base = cta * WARPS + warps, OUT + 512 * number
        if name == "write":
            self.races.write(actors, base + 4 * warps, 4, WRITE)
        elif name == "read":  # what another warp has written
            self.races.read(actors, base + 4 * (WARPS - 1 - warps), 4, READ)
        elif name == "barrier":
            self.clocks.barrier(cta, ALL)
        elif name == "fence":
            for actor in actors:
                self.races.fence(int(actor))
        else:
            order = {"release": name == "release", "acquire": name == "acquire"}
            self.races.synchronise(int(actors[0]), COUNTER + 4 * number, **order)


@pytest.mark.parametrize(
    ("words", "readers"),
    [
        ("write@0 barrier@0 release@0 acquire@1 barrier@1 read@1", 0),
        ("write@0 release@0 acquire@1 barrier@1 read@1", WARPS - 1),  # without a barrier it is of one warp
        ("write@0 barrier@0 release@0 acquire@1 read@1", WARPS - 1),
        ("write@0 barrier@0 write@0.2/1 release@0 acquire@1 barrier@1 read@1", 0),
        ("write@0 barrier@0 write@0.2/1 release@0 acquire@1 barrier@1 read@1.1/1", 1),
        ("write@0.0 release@0 acquire@1.0 barrier@1 release@1.3/1 acquire@2.0/1 read@2.3", 1),
        ("write@0.0 release@0 acquire@1.0 barrier@1 release@1.3/1 acquire@2.3/1 read@2.3", 0),
        ("write@0 fence@0 barrier@0 add@0 add@1 barrier@1 fence@1 read@1", 0),
        ("write@0 barrier@0 add@0 add@1 barrier@1 fence@1 read@1", WARPS),
        ("write@0 fence@0.0 barrier@0 add@0 acquire@1 barrier@1 read@1", WARPS - 1),
        ("write@0 read@0", 0),  # warps of one CTA do not race here
    ],
)
def test_what_one_warp_releases_and_acquires_is_of_those_that_a_barrier_joins(words: str, readers: int) -> None:
    assert sum(race.count for race in Grid(words).races.found) == readers


# Tensor maps that a kernel makes


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        ("use@1", True),  # a map of the host
        ("make@1 use@1", False),
        ("make@1 fence@1 use@1", True),
        ("make@0 fence@0 use@2", False),
        ("make@0 fence@0 barrier@0 use@2", True),
        ("make@0 fence@2 barrier@0 use@2", False),
        ("make@0 fence@2 barrier@0 fence@2 use@2", True),
        ("make@1 fence@1 make@1 use@1", False),
        ("make@1 other@1 use@1", False),
    ],
)
def test_a_fence_stands_between_the_making_of_a_map_and_its_use(words: str, ordered: bool) -> None:
    clocks, address, made = VectorClocks(2, 4), 0x7F00_0000_0000, 5
    maps, found = MapOrder(clocks), None
    for word in words.split():
        name, warp = word.split("@")
        if name == "make":
            maps.write(0, int(warp), address, made)
        elif name == "barrier":
            clocks.barrier(0, range(4))
        elif name == "use":
            found = maps.use(0, int(warp), address)
        else:  # `other`: of another address, and of this one in another CTA
            maps.fence(0, int(warp), address + (128 if name == "other" else 0))
            maps.fence(1, int(warp), address)
    assert found == (None if ordered else made)
    assert maps.use(1, 1, address) is None
