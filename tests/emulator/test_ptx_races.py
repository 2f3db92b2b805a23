"""Races on shared memory between four warps, their copies, loads, products and stores, in programs of a few moves."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from rooflab.bench.emulator.races.reports import describe
from rooflab.bench.emulator.races.shared_races import SharedRaces
from rooflab.bench.emulator.races.vector_clocks import BULK, TMA_LOAD, WGMMA, AsyncOperation

SIZE = 16384
ALL = np.arange(4)
LANE_WARPS = np.arange(128) // 32
LANES = np.arange(128) * 16
STAGE = 2048
TILE = np.arange(0, STAGE, 1024)
"""The first 2 KiB in blocks: what the 128 lanes cover with 16 bytes each."""
FULL = 8192
"""The first address of a ring of mbarriers."""
NAMES = ["", "store", "read", "copy", "load", "multiply", "save", "init", "use", "inval", "atomic"]
STORE, READ, COPY, TMA, MMA, SAVE, INIT, USE, INVAL, ATOMIC = range(1, 11)


def own(warp: int) -> np.ndarray:
    """Lanes of one warp."""
    return np.full(32, warp)


PLACES = np.arange(32) * 4


class Program:
    """What random programs of `test_ptx_race_model.py` lack: whole tiles, names, mbarriers' words, ends of CTAs.

    Moves, each a word: `read@12/1` is done by warps 1 and 2 to stage 1; without a number by all, to stage 0."""

    def __init__(self, words: str = "") -> None:
        self.races = SharedRaces(1, 4, SIZE)
        self.transfers: list[AsyncOperation] = []
        self.run(words)

    def run(self, words: str) -> Program:
        for word in words.split():
            name, warps, stage = re.fullmatch(r"([a-z_]+)(?:@(\d+))?(?:/(\d))?", word).groups()
            MOVES[name](self, np.array([*map(int, warps)]) if warps else ALL, int(stage or 0))
        return self

    @property
    def kinds(self) -> list[str]:
        """What was found: `write-read store load`, with `proxy` where only a fence of the proxies lacks."""
        return [
            f"{race.kind} {NAMES[race.first]} {'' if race.kind == 'end' else NAMES[race.second]}"
            f"{' proxy' if race.proxy else ''}".strip()
            for race in self.races.found
        ]

    def lanes(self, access: str, warps: np.ndarray, stage: int, instruction: int, order: int = 1) -> None:
        """An access of all lanes, or of the first 128 bytes by each of the warps."""
        function = getattr(self.races, access)
        if warps is ALL:
            function(0, LANE_WARPS, STAGE * stage + LANES[::order], 16, instruction)
        else:
            for warp in warps:
                function(0, own(warp), STAGE * stage + PLACES, 4, instruction)

    def begin(self, kind: str, warps: np.ndarray | int = 0) -> AsyncOperation:
        self.transfers.append(self.races.begin_async(0, warps, kind))
        return self.transfers[-1]

    def load(self, stage: int) -> None:
        """A load whose phase of the mbarrier is over when it is done."""
        self.races.signal(0, 0, FULL + 8 * stage)
        transfer = self.begin(TMA_LOAD)
        self.races.async_write(transfer, TILE + STAGE * stage, 1024, TMA)
        self.races.signal_async(transfer, FULL + 8 * stage)
        self.races.complete(0, FULL + 8 * stage)


MOVES: dict[str, Callable[[Program, np.ndarray, int], object]] = {
    "store": lambda p, warps, stage: p.lanes("write", warps, stage, STORE),
    "read": lambda p, warps, stage: p.lanes("read", warps, stage, READ, -1),  # of all warps: what another has stored
    "read_own": lambda p, warps, stage: p.lanes("read", warps, stage, READ),
    "use": lambda p, warps, stage: p.lanes("read", warps, stage, USE),
    "atomic": lambda p, warps, stage: p.lanes("atomic", warps, stage, ATOMIC),
    "barrier": lambda p, warps, _: p.races.barrier(0, warps),
    "fence": lambda p, warps, _: p.races.fence_proxy_async(0, warps),
    "fence_init": lambda p, warps, _: p.races.fence_mbarrier_init(0, warps[0]),
    "arrive": lambda p, warps, stage: p.races.signal(0, warps, FULL + 8 * stage),
    "phase": lambda p, _, stage: p.races.complete(0, FULL + 8 * stage),
    "wait": lambda p, warps, stage: p.races.wait(0, warps, FULL + 8 * stage),
    "copy": lambda p, _, stage: p.races.copy_async(0, LANE_WARPS, STAGE * stage + LANES, 16, COPY),
    "commit": lambda p, warps, _: p.races.commit_copies(0, warps),
    "drain": lambda p, warps, pending: p.races.wait_copies(0, warps, pending),
    "copies_arrive": lambda p, warps, stage: p.races.signal_copies(0, warps, FULL + 8 * stage),
    "load": lambda p, _, stage: p.load(stage),
    "begin": lambda p, *_: p.begin(TMA_LOAD),
    "bring": lambda p, _, stage: p.races.async_write(p.transfers[-1], TILE + STAGE * stage, 1024, TMA),
    "multiply": lambda p, _, stage: p.races.async_read(p.begin(WGMMA, ALL), TILE + STAGE * stage, 1024, MMA),
    "begin_save": lambda p, warps, _: p.begin(BULK, warps[0]),
    "take": lambda p, *_: p.races.async_read(p.transfers[-1], TILE, 1024, SAVE),
    "save": lambda p, *_: p.races.async_read(p.begin(BULK), TILE, 1024, SAVE),
    "done": lambda p, warps, number: p.races.acquire_async(0, warps, p.transfers[number]),
    "init": lambda p, warps, _: p.races.mbarrier_init(0, int(warps[0]), FULL, INIT),
    "use_mbarrier": lambda p, warps, _: p.races.mbarrier_use(0, warps, FULL, USE),
    "tell": lambda p, *_: p.races.mbarrier_use_async(p.transfers[-1], FULL, TMA),
    "tell_unfenced": lambda p, *_: p.races.mbarrier_use_async(p.transfers[-1], FULL, TMA, needs_fence=False),
    "inval": lambda p, *_: p.races.mbarrier_inval(0, 0, FULL, INVAL),
    "end": lambda p, *_: p.races.end(0),
}
THREE = "copy commit copy/1 commit copy/2 commit"
RIGHT = [
    # Warps and barriers.
    "store barrier read", "store read_own store", "read barrier store", "store@0 arrive@01 phase wait@1 read@1",
    # cp.async.
    "copy commit drain barrier read", f"{THREE} drain/1 read_own read_own/1", f"{THREE} drain/2 read_own",
    "copy copies_arrive phase wait read", "copy commit drain fence barrier multiply",
    # The proxies.
    "store fence barrier multiply", "store barrier fence save", "read barrier load", "store fence barrier load",
    # Loads, products and stores in flight.
    "load wait read", "load wait multiply", "multiply done barrier store", "save done@0 barrier store",
    "multiply multiply/1 multiply/2 done/1 load load/1", "begin bring bring", "begin bring done multiply",
    # mbarriers' words.
    "init fence@0 barrier use_mbarrier load tell wait barrier inval", "init barrier load tell_unfenced",
    "init store@0 fence@0 begin_save tell take", "init store@0 fence_init@0 begin_save tell",
    "init fence_init@0 barrier begin_save@1 tell",
    # What was waited for when its CTA ended.
    "copy commit drain end", "load wait@3 end", "multiply multiply/1 done/1 end", "save save done@0/1 end",
]  # fmt: skip
WRONG = {
    "store read": "write-read store read",
    "read store": "read-write read store",
    "arrive@0 phase store@0 arrive@0 wait@1 read@1": "write-read store read",  # what is signalled is of before
    "read@0 atomic@1": "read-write read atomic",
    "store@0 atomic@1": "write-write store atomic",
    "atomic@0 store@1": "write-write atomic store",
    "read copy": "read-write read copy",
    "copy commit store": "write-write copy store",
    "copy commit drain barrier multiply": "write-read copy multiply proxy",
    "store barrier multiply": "write-read store multiply proxy",
    "store@0 fence@0 barrier@012 multiply": "write-read store multiply",
    "read load": "read-write read load",
    "store barrier load": "write-write store load proxy",
    "load multiply": "write-read load multiply",
    "multiply barrier store": "read-write multiply store",
    "multiply multiply/1 multiply/2 done/1 load/2": "read-write multiply load",
    "save multiply/1 done/1 barrier store": "read-write save store",
    "begin store@0 fence@0 bring": "write-write store load",
    "init use_mbarrier": "write-read init use",
    "init barrier load tell": "write-read init load proxy",
    "init@1 load tell_unfenced": "write-read init load",
    "init barrier use_mbarrier inval": "read-write use inval",
    "load inval": "read-write inval inval",
    "init store@0 fence_init@0 begin_save tell take": "write-read store save proxy",
    "copy drain end": "end copy",
    "copy commit drain/1 end": "end copy",
    "load end": "end load",
    "multiply multiply/1 done end": "end multiply",
    "save save done@0 end": "end save",
}


@pytest.mark.parametrize("words", RIGHT)
def test_what_is_ordered_is_not_reported(words: str) -> None:
    assert Program(words).kinds == []


@pytest.mark.parametrize("words", WRONG)
def test_what_is_not_ordered_is_reported_once(words: str) -> None:
    assert Program(words).kinds == [WRONG[words]]


@pytest.fixture
def races() -> SharedRaces:
    return SharedRaces(1, 4, SIZE)


def test_a_report_says_who_did_what_where_and_what_is_missing() -> None:
    (race,) = Program("store read").races.found
    assert race.count == 512 and race.first_actor != race.second_actor
    assert {race.first_actor, race.second_actor} <= {f"warp {warp}" for warp in range(4)}
    text = describe(race, {STORE: "line 3 (st.shared)", READ: "line 9 (ld.shared)"}.get)
    assert text.startswith("write-read race on shared memory at 0x")
    assert "line 3 (st.shared) wrote it in warp" in text and "line 9 (ld.shared) read it in warp" in text
    assert text.endswith("with nothing that orders them between")
    (race,) = Program("copy commit read_own").races.found
    assert describe(race, str).endswith("with no wait for cp.async of warp 0 between")
    (race,) = Program("store fence@012 barrier multiply").races.found
    assert race.first_actor == "warp 3" and describe(race, str).endswith("with no fence.proxy.async between")
    (race,) = Program("load inval").races.found
    assert (race.first_actor, race.address) == ("a TMA load", FULL)
    (race,) = Program("copy end").races.found[:1]
    assert describe(race, {COPY: "line 3 (cp.async)"}.get) == (
        "the CTA ended, and nothing had waited for cp.async of warp 0: "
        "line 3 (cp.async) may still use its shared memory"
    )


# Slots, granules and limits


def test_slots_know_nothing_of_each_other() -> None:
    races = SharedRaces(3, 4, SIZE)
    for slot in range(3):
        races.write(slot, LANE_WARPS, slot * SIZE + LANES, 16, STORE)
    races.barrier(np.array([0, 2]), ALL)
    for slot in (0, 2):
        races.read(slot, LANE_WARPS, slot * SIZE + LANES[::-1], 16, READ)
    races.end(0)
    assert races.found == []
    races.read(1, LANE_WARPS, SIZE + LANES[::-1], 16, READ)
    assert [race.slot for race in races.found] == [1] and "(CTA 1)" in describe(races.found[0], str)


def test_reports_are_counted_and_capped_and_equal_values_do_not_keep_out_a_race() -> None:
    races = SharedRaces(1, 2, SIZE, limit=2)
    warps, places = np.repeat([0, 1], 32), np.tile(PLACES, 2)
    for instruction in range(5):
        races.write(0, warps, places, 4, instruction, np.zeros(64, np.uint32))
        races.barrier(0, np.arange(2))
    for instruction in (*range(10, 14), 10):
        races.write(0, np.array([0]), np.array([0]), 4, STORE)
        races.read(0, np.array([1]), np.array([0]), 4, instruction)
        races.barrier(0, np.arange(2))
    assert sum(race.harmless for race in races.found) == 5
    assert [(race.second, race.count) for race in races.found if not race.harmless] == [(10, 2), (11, 1)]


@pytest.mark.parametrize("granule", [1, 2, 4])
def test_neighbours_of_the_granule_are_told_apart(granule: int) -> None:
    races = SharedRaces(1, 2, SIZE, granule)
    for warp in range(2):
        races.write(0, np.array([warp]), np.array([warp * granule]), granule, STORE)
    assert races.found == []
    races.read(0, np.array([1]), np.array([0]), granule, READ)
    assert [(race.address, race.count) for race in races.found] == [(0, 1)]


# Lanes and values


def test_warps_that_write_one_place_in_one_instruction_race(races: SharedRaces) -> None:
    races.copy_async(0, LANE_WARPS, LANES % 1024, 16, COPY)
    races.write(0, LANE_WARPS, 4096 + np.arange(128) % 64 * 4, 4, STORE)
    same = [(np.arange(128) % 64).astype(np.float32), np.float32("nan")]
    races.write(0, LANE_WARPS, 8192 + np.arange(128) % 64 * 4, 4, SAVE, same)
    assert [(race.kind, race.same_value) for race in races.found] == [("write-write", equal) for equal in (0, 0, 1)]
    assert [race.count for race in races.found[:2]] == [64, 64]
    assert describe(races.found[2], str).endswith("; both leave the same value")


def test_lanes_of_one_warp_race_only_with_different_values(races: SharedRaces) -> None:
    same = np.zeros(32, np.int64)
    for values in (None, [np.uint32(7)], [np.full(32, 7, np.uint32)]):
        races.write(0, own(0), same, 4, STORE, values)
    assert races.found == []
    races.write(0, own(0), same, 4, STORE, [np.arange(32, dtype=np.uint32)])
    assert [(race.kind, race.count) for race in races.found] == [("lanes", 31)]
    assert "lanes of one warp write different values" in describe(races.found[0], str)


def test_sums_that_differ_by_rounding_are_told_apart_from_other_values(races: SharedRaces) -> None:
    """Triton 3.9 lets all lanes store a warp's sum, of which a fused multiply-add rounded one term in each lane."""
    same = np.zeros(32, np.int64)
    total = np.full(32, 1.5, np.float32)
    total[::2] = np.nextafter(total[::2], np.float32(2))
    races.write(0, own(0), same, 4, STORE, [total.view(np.uint32)])
    assert [(race.kind, race.count) for race in races.found] == [("rounding", 16)]
    assert "differ by rounding, and which one stays is undefined" in describe(races.found[0], str)
    for number, other in enumerate((1.51, np.nan, -1.5), 1):
        total[3] = other
        races.write(0, own(0), same, 4, STORE, [total.view(np.uint32)])
        assert (races.found[-1].kind, races.found[-1].count) == ("lanes", number)


@pytest.mark.parametrize(
    ("places", "width", "registers"),
    [
        pytest.param(np.zeros(32, np.int64), 4, 1, id="one row a warp, since Triton 3.8"),
        pytest.param(np.arange(32) // 8 * 4, 4, 1, id="four rows a warp, Triton 3.6"),
        pytest.param(np.arange(32) // 4 * 16, 16, 4, id="rows of stmatrix, since Triton 3.8"),
    ],
)
def test_warps_that_hold_one_row_may_all_store_its_sum(places: np.ndarray, width: int, registers: int) -> None:
    """The lanes' sums differ by rounding; a warp whose sum is another races, at once and later."""
    sums = np.tile(np.where(np.arange(32) % 2, 1.5, np.nextafter(np.float32(1.5), 2)).astype(np.float32), 2)
    for together in (True, False):
        for other, wrong in ((sums[31], 0), (sums[30], 1)):
            sums[63] = other
            races, memory = SharedRaces(1, 2, SIZE), np.zeros((registers, SIZE), np.float32)
            for warps in [np.repeat([0, 1], 32)] if together else [own(0), own(1)]:
                where = np.resize(places, warps.size)
                values = [sums[:32] if warps[-1] == 0 else sums[-warps.size :]] * registers
                races.write(0, warps, where, width, STORE, values, lambda at=where, of=memory: [row[at] for row in of])
                memory[:, where] = values
            harmful = [race.kind for race in races.found if not race.harmless]
            assert harmful.count("write-write") == wrong and set(harmful) <= {"rounding", "write-write"}


def test_a_store_of_what_was_there_is_marked_and_looked_up_only_for_a_race(races: SharedRaces) -> None:
    races.write(0, own(0), PLACES, 4, STORE, [np.uint32(1)], lambda: pytest.fail("looked up"))
    old = np.arange(32, dtype=np.uint32)
    new = np.where(old == 5, 99, old).astype(np.uint32)
    races.write(0, own(1), PLACES, 4, SAVE, [new], lambda: [old])
    assert sorted((race.same_value, race.count) for race in races.found) == [(False, 1), (True, 31)]
