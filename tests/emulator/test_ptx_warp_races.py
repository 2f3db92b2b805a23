"""Races on global memory between the warps of one CTA: what orders them, and what a report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_lines import SHARED, launch

from rooflab.bench.emulator.results import LaunchResult

SEEDS = pytest.mark.parametrize("seed", [0, 1, 3])
OTHER = """xor.b32 %r2, %r30, 32; mul.wide.u32 %d3, %r2, 4; add.u64 %d3, %d0, %d3; setp.ge.u32 %p1, %r0, 32;
    setp.lt.u32 %p2, %r0, 32; mov.u32 %r1, 7; add.u32 %r6, %r0, 100;
    mad.wide.u32 %d4, %r31, 256, %d0; add.u64 %d5, %d4, 128;"""
"""%d2 is the thread's word, %d3 the word of the same lane in the other warp; %d4 and %d5 the CTA's words 0 and 32."""
STORE, READ = "@%p2 st.global.u32 [%d3], %r6;", "@%p1 ld.global.u32 %r1, [%d2];"
"""Warp 0 stores the words that warp 1 reads."""


def run(body: str, **more: Any) -> LaunchResult:
    """Two warps a CTA.  At the end each thread stores its word, after a barrier."""
    return launch(OTHER + body + "bar.sync 0;", block=64, **{"grid": 3, **more})[1]


def found(body: str, **more: Any) -> set[str]:
    """The kinds of the races of such a run; another order of the warps turns a read-write race round."""
    kinds = {race.split(" on ")[0] for race in run(body, **more).races}
    return {"read-write race" if kind == "write-read race" else kind for kind in kinds}


@SEEDS
@pytest.mark.parametrize("grid", [1, 3])
def test_a_barrier_orders_the_warps_of_a_cta(seed: int, grid: int) -> None:
    assert found(f"{STORE} bar.sync 0; {READ}", seed=seed, grid=grid) == set()
    race = run(f"{STORE} {READ}", seed=seed, grid=grid).races[0]
    assert "race on global memory, byte " in race
    assert "in warp 0 of CTA" in race and "in warp 1 of CTA" in race and "with nothing that orders them" in race
    assert found(f"{READ} bar.sync 0; {STORE}", seed=seed, grid=grid) == set()
    assert len(found(f"bar.sync 0; {READ} {STORE}", seed=seed, grid=grid)) == 1


@SEEDS
def test_stores_of_two_warps_race_unless_they_store_the_same(seed: int) -> None:
    assert found("@%p0 st.global.u32 [%d4], 1; setp.eq.u32 %p3, %r0, 32; @%p3 st.global.u32 [%d4], 2;", seed=seed) == {
        "write-write race"
    }
    assert found("mov.u32 %r3, 9; st.global.u32 [%d4], %r3;", seed=seed) == set()
    assert found("shr.u32 %r3, %r0, 5; st.global.u32 [%d4], %r3;", seed=seed) == {"write-write race"}


def test_lanes_of_one_warp_that_store_different_values_to_one_place_are_seen() -> None:
    (race,) = run("@%p2 st.global.u32 [%d4], %r6;").races
    assert race.startswith("lanes of one warp write different values to one address")


@SEEDS
def test_atomics_do_not_race_with_each_other_but_with_plain_accesses(seed: int) -> None:
    add = "red.global.add.u32 [%d4], 1;"
    assert found(add, seed=seed) == set()
    assert found(f"{add} bar.sync 0; @%p1 ld.global.u32 %r1, [%d4];", seed=seed) == set()
    assert found(f"@%p2 {add} @%p1 ld.global.u32 %r1, [%d4];", seed=seed) == {"read-write race"}
    assert found(f"@%p2 {add} @%p1 st.global.u32 [%d4], 5;", seed=seed) == {"write-write race"}
    assert found("red.cta.global.add.u32 [%d4], 1;", seed=seed, grid=1) == set()


@SEEDS
def test_a_flag_orders_the_warps_of_a_cta(seed: int) -> None:
    wait = "W: ld.acquire.gpu.global.u32 %r4, [%d5]; setp.ne.u32 %p4, %r4, 9; @%p4 bra W; ld.global.u32 %r1, [%d4];"
    body = "@%p1 bra READS; {} bra END; READS: {} END:"
    setting = "@%p0 st.global.u32 [%d4], 3; @%p0 st.release.gpu.global.u32 [%d5], 9;"
    assert found(body.format(setting, wait), seed=seed, grid=1) == set()


@SEEDS
def test_one_of_many_readers_is_enough(seed: int) -> None:
    reads = "ld.global.u32 %r1, [%d4];"
    assert found(f"{reads} @%p0 st.global.u32 [%d4], 5;", seed=seed) == {"read-write race"}
    assert found(f"{reads} bar.sync 0; @%p0 st.global.u32 [%d4], 5;", seed=seed) == set()
    own = "@%p2 ld.global.u32 %r1, [%d4]; @%p0 st.global.u32 [%d4], 5;"
    assert found(own, seed=seed) == set()


@SEEDS
def test_an_mbarrier_orders_global_memory_too(seed: int) -> None:
    made = "mov.u32 %r5, s; @%p0 mbarrier.init.shared.b64 [%r5], 32; bar.sync 0; @%p1 bra READS;"
    wait = "READS: W: mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0; @!%p4 bra W; ld.global.u32 %r1, [%d2]; END:"
    tell = "mbarrier.arrive.shared.b64 _, [%r5];"
    for between, races in ((tell, 0), ("", 1)):
        store = (
            f"st.global.u32 [%d3], %r6; {between} bra END;" if between else f"{tell} st.global.u32 [%d3], %r6; bra END;"
        )
        assert len(found(f"{made} {store} {wait}", seed=seed, declared=SHARED)) == races


ALL_STORE = "mov.u32 %r1, 0; mov.u32 %r5, s; mad.lo.u32 %r7, %r0, 4, %r5; st.shared.u32 [%r7+64], %r0;"
ARRIVES = "mov.u32 %r5, s; @%p0 mbarrier.init.shared.b64 [%r5], 1; bar.sync 0; @%p1 bra READS;"
READS = "bra END; READS: W: mbarrier.try_wait.parity.shared.b64 %p4, [%r5], 0; @!%p4 bra W; "
SETS = "setp.eq.u32 %p5, %r31, 1; mul.wide.u32 %d6, %r0, 4; add.u64 %d6, %d0, %d6; mov.u32 %r1, 0; @%p5 bra READS;"
POLLS = (
    "bra END; READS: W: ld.acquire.gpu.u32 %r4, [%d0+256]; setp.ne.u32 %p4, %r4, 9; @%p4 bra W; ld.u32 %r1, [%d6]; END:"
)
ONE_RELEASES = {
    "an arrival, shared": f"{ARRIVES} {ALL_STORE} {{}} @%p0 mbarrier.arrive.shared.b64 _, [%r5]; {READS}"
    " mad.lo.u32 %r7, %r0, 4, %r5; ld.shared.u32 %r1, [%r7+-64]; END:",
    "an arrival, global": f"{ARRIVES} st.global.u32 [%d3], %r6; {{}} @%p0 mbarrier.arrive.shared.b64 _, [%r5]; {READS}"
    " ld.global.u32 %r1, [%d2]; END:",
    "a bulk copy": f"{ALL_STORE} fence.proxy.async; {{}} @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0+512],"
    " [%r5+64], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
    "a flag": f"{SETS} st.u32 [%d6], %r6; {{}} @%p0 st.release.gpu.u32 [%d0+256], 9; {POLLS}",
    "a flag after a fence": f"{SETS} st.u32 [%d6], %r6; {{}} fence.acq_rel.gpu; @%p0 red.relaxed.gpu.add.u32 [%d0+256],"
    f" 9; {POLLS}",
}
"""All lanes of a warp store, and one of them releases; others read, in another warp (a CTA, for the flags)."""


@pytest.mark.parametrize("name", ONE_RELEASES)
def test_a_lane_that_releases_alone_orders_no_stores_of_the_other_lanes(name: str) -> None:
    """As all lanes of a warp store and one arrives, in cudnn-frontend 426 (of shared memory, after elect.sync)."""
    body, flag = ONE_RELEASES[name], "flag" in name
    options = {"declared": SHARED, "block": 32 if flag or "copy" in name else 64, "grid": 2 if flag else 1}
    body = f"{OTHER} {body} bar.sync 0; add.u64 %d2, %d2, 1024;"
    for between in ("", "elect.sync %r2|%p3, -1;", "bar.warp.sync 0xffff0000;"):
        text = body.format(
            between if "0xf" not in between else "setp.lt.u32 %p6, %r0, 16; @%p6 bra L;" + between + "L:"
        )
        (found,) = launch(text, to=torch.zeros(512, dtype=torch.int32), **options)[1].findings
        assert (found.rule, found.severity, found.missing) == ("race", "error", "bar.warp.sync")
        assert "lanes of one warp: " in found.text and "st." in found.other_instruction
    for between in ("bar.warp.sync -1;", "shfl.sync.idx.b32 %r2, %r0, 0, 31, -1;", "vote.sync.any.pred %p3, %p0, -1;"):
        assert not launch(body.format(between), to=torch.zeros(512, dtype=torch.int32), **options)[1].findings


def test_stores_of_the_lane_that_releases_or_that_all_lanes_release_are_ordered() -> None:
    mine = (
        ONE_RELEASES["an arrival, shared"]
        .format("")
        .replace("[%r7+64], %r0", "[%r5+64], 5")
        .replace("%r7+-64", "%r5+64")
    )
    assert run(mine, declared=SHARED, grid=1).races == (), "all lanes store one value to one place"
    each = (
        ONE_RELEASES["a flag"]
        .format("")
        .replace("@%p0 st.release.gpu.u32 [%d0+256], 9", "red.release.gpu.add.u32 [%d0+256], 1")
    )
    each = each.replace("setp.ne.u32 %p4, %r4, 9", "setp.ne.u32 %p4, %r4, 32")
    text = f"{OTHER} {each} add.u64 %d2, %d2, 1024;"
    assert not launch(text, to=torch.zeros(512, dtype=torch.int32), grid=2)[1].findings


def test_warps_that_run_a_loop_with_a_barrier_differently_often_are_seen_though_others_meet_them() -> None:
    loop = "{0}: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p4, %r3, 0; @%p4 bra {0};"
    counts = "shr.u32 %r3, %r0, 5; add.u32 %r3, %r3, 1;"
    body = f"{counts} {loop.format('A')} shr.u32 %r3, %r0, 5; sub.u32 %r3, 2, %r3; {loop.format('B')}"
    assert any("is met more often by some warps than by others" in race for race in run(body).races)
    assert run(body.replace("shr.u32 %r3, %r0, 5;", "mov.u32 %r3, 1;")).races == ()


@SEEDS
def test_a_copy_of_a_read_is_no_fault_if_its_warp_stores_nothing_of_it(seed: int) -> None:
    """As Triton's code for a tensor of 32 elements: both warps load them, and one stores."""
    text = "ld.global.u32 %r4, [%d4]; bar.warp.sync -1; @%p0 st.global.u32 [%d4], %r6; {} exit;"
    assert found(text.format(""), seed=seed) == set()
    assert found(text.format("@%p1 st.global.u32 [%d2], %r6;"), seed=seed) == set()
    assert found(text.format("@%p1 st.global.u32 [%d2], %r4;"), seed=seed) == {"read-write race"}
    assert found(text.format("add.u32 %r5, %r4, 1; mov.b32 %r7, %r5; @%p1 st.global.u32 [%d2], %r7;")) != set()
