"""mbarriers, barriers of CTAs and of clusters, in kernels of a few PTX lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_lines import SHARED, TEXT, error, kinds, launch

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks

PAIR: dict[str, Any] = {"declared": SHARED, "grid": 2, "cluster": (2, 1, 1)}
BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ADDRESSES = """
    mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; xor.b32 %r5, %r4, 128;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1;
    mapa.shared::cluster.u32 %r8, %r4, %r7; mapa.shared::cluster.u32 %r9, %r5, %r7;
"""
"""%r4 and %r5: the thread's word and one of the other warp; %r8 and %r9: the same in the other CTA."""


# mbarriers

MBARRIER = "mov.u32 %r2, s; @%p0 mbarrier.init.shared.b64 [%r2], {}; bar.sync 0; "
OVER = "mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0; selp.u32 %r1, 1, 0, %p2;"
DROP = "@%p0 mbarrier.arrive_drop.expect_tx.shared.b64 _, [%r2], 16;"
ELECTED = "setp.eq.u32 %p1, %r0, 5; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r0; bar.warp.sync -1;"
BROUGHT = "@%p0 mbarrier.complete_tx.relaxed.cluster.shared::cta.b64 [%r2], {};"
PROMISE = "mov.u32 %r3, 1; @%p0 mbarrier.{}.noComplete.release.cta.shared::cta.b64 %d3, [%r2], %r3;"


@pytest.mark.parametrize(
    ("count", "body", "over"),
    [
        (1, DROP, 0),
        (1, DROP + BROUGHT.format(16), 1),
        (1, ELECTED + BROUGHT.format(4), 0),  # the electing thread's own number is announced
        (1, ELECTED + BROUGHT.format(5), 1),
        (1, "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r2], 16; @%p0 mbarrier.arrive.shared.b64 _, [%r2];", 0),
        (496, "@!%p0 mbarrier.arrive.shared.b64 _, [%r2], %r0;", 1),  # each thread as often as it says
        (2, PROMISE.format("arrive"), 0),
        (2, PROMISE.format("arrive_drop"), 0),
    ],
)
def test_a_phase_waits_for_all_arrivals_and_bytes(count: int, body: str, over: int) -> None:
    assert launch(MBARRIER.format(count) + body + OVER, declared=SHARED)[0] == [over] * 32


@pytest.mark.parametrize(("drop", "second"), [("", 0), ("_drop", 1)])
def test_an_mbarrier_counts_again_in_each_phase_less_what_was_dropped(drop: str, second: int) -> None:
    """Of two arrivals the first phase has both; one more ends the second phase where the first dropped one."""
    body = f"""@%p0 mbarrier.arrive.shared.b64 _, [%r2]; @%p0 mbarrier.arrive{drop}.shared.b64 _, [%r2];
        @%p0 mbarrier.arrive.shared.b64 _, [%r2]; bar.sync 0; {OVER.replace(", 0; selp", ", 1; selp")}"""
    assert launch(MBARRIER.format(2) + body, declared=SHARED)[0] == [second] * 32


def test_each_thread_asks_for_its_own_phase_and_mbarrier() -> None:
    two = "mov.u32 %r2, s; add.u32 %r3, %r2, 8; @%p0 mbarrier.init.shared.b64 [%r2], 1;"
    two += "@%p0 mbarrier.init.shared.b64 [%r3], 1; @%p0 mbarrier.arrive.shared.b64 _, [%r2]; bar.sync 0;"
    two += "and.b32 %r4, %r0, 1; mad.lo.u32 %r5, %r4, 8, %r2;"
    for wait in ("[%r2], %r4", "[%r5], 0"):
        ask = f"mbarrier.test_wait.parity.shared.b64 %p2, {wait}; selp.u32 %r1, 1, 0, %p2;"
        assert launch(two + ask, declared=SHARED)[0] == [1, 0] * 16


def test_threads_of_a_warp_may_wait_for_what_others_of_it_do() -> None:
    body = """mov.u32 %r2, s; shl.b32 %r3, %r0, 3; add.u32 %r3, %r2, %r3; mbarrier.init.shared.b64 [%r3], 1;
        bar.warp.sync -1; @%p0 mbarrier.arrive.shared.b64 _, [%r3];
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0; @!%p1 bra W;
        setp.lt.u32 %p2, %r0, 31; add.u32 %r4, %r3, 8; @%p2 mbarrier.arrive.shared.b64 _, [%r4]; mov.u32 %r1, 7;"""
    assert launch(body, declared=SHARED)[0] == [7] * 32


def test_what_no_mbarrier_gets_or_holds_is_named() -> None:
    arrive = "mov.u32 %r2, s; mbarrier.arrive.shared.b64 _, [%r2];"
    assert "holds no mbarrier that was initialised" in error(arrive, declared=SHARED)
    for body, words in (
        ("mbarrier.arrive_drop.shared.b64 _, [%r2];", "32 arrivals are dropped of the 1 of an mbarrier"),
        (PROMISE.format("arrive"), "an arrival with .noComplete ends the phase of its mbarrier"),
        (PROMISE.format("arrive_drop"), "an arrival with .noComplete ends the phase of its mbarrier"),
    ):
        assert words in error(MBARRIER.format(1) + body, declared=SHARED)
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0; @!%p1 bra W;"
    assert "2 of 2 arrivals and 0 bytes missing" in error(MBARRIER.format(2) + wait, declared=SHARED)
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d3], 128, [%r2];"
    outside = "add.u32 %r3, %r2, 128; add.u64 %d3, %d0, 64; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;"
    assert "128 bytes into to of 128" in error(f"{MBARRIER.format(1)} {outside} @%p0 {bulk} {wait}", declared=SHARED)


# Barriers of CTAs


@pytest.mark.parametrize(("form", "want"), [("and.pred %p2", 1), ("or.pred %p2", 1), ("popc.u32 %r1", 48)])
def test_a_barrier_that_votes_counts_threads_and_not_warps(form: str, want: int) -> None:
    body = f"setp.ge.u32 %p1, %r0, 0; bar.red.{form}, 0, %p1;"
    body += "" if "popc" in form else "selp.u32 %r1, 1, 0, %p2;"
    assert launch(body, block=48)[0] == [want] * 48
    for left in (1, 33, 48):  # threads that return early are not waited for
        early = f"setp.ge.u32 %p3, %r0, {left}; @%p3 exit;"
        wanted = left if "popc" in form else want
        assert launch(early + body, block=64)[0] == [wanted] * left + [0] * (64 - left)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("bar.sync 16;", "a barrier's number is 0 to 15, got 16"),
        ("bar.sync 1, 40;", "a barrier wants a multiple of 32 threads, got 40"),
        ("bar.arrive 1;", "bar.arrive wants the number of threads"),
        ("@%p7 bra E; bar.sync 1, 64; bra F; E: bar.sync 1; F:", "barrier 1 is awaited by 64 and by 128 threads"),
    ],
)
def test_a_barrier_that_is_none_is_refused(body: str, words: str) -> None:
    assert words in error("setp.lt.u32 %p7, %r0, 32; " + body, block=128)


@pytest.mark.parametrize("count", [16, 24, 60, 256, 264])
def test_warps_ask_for_registers_from_24_to_256_in_steps_of_8(count: int) -> None:
    text = error(f"setmaxnreg.inc.sync.aligned.u32 {count}; mov.u32 %r1, 1;", block=128)
    assert ("needs a kernel with .maxnreg" if count in (24, 256) else f"from 24 to 256, got {count}") in text


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("add.u32 %r3, %r2, 1; LOOP: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra LOOP;", True),
        (
            "add.u32 %r3, %r2, 1; LOOP: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra LOOP;"
            " bar.sync 0;",
            True,
        ),
        ("mov.u32 %r3, 3; LOOP: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra LOOP;", False),
        ("bar.sync 0; setp.eq.u32 %p1, %r2, 1; @%p1 exit; bar.sync 0;", False),  # it never comes to the second one
        ("add.u32 %r3, %r31, 1; LOOP: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra LOOP;", False),
        (f"add.u32 %r3, %r2, 1; LOOP: {BARRIER} sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra LOOP;", True),
        (f"{BARRIER} setp.eq.u32 %p1, %r31, 1; @%p1 exit; {BARRIER}", False),
    ],
)
def test_a_barrier_that_warps_meet_a_different_number_of_times_is_found(body: str, found: bool, seed: int) -> None:
    races = launch(
        f"shr.u32 %r2, %r0, 5; {body}", block=96, grid=3, seed=seed, cluster=(1 + 2 * ("cluster" in body), 1, 1)
    )[1].races
    assert any("is met more often by some warps" in race for race in races) == found == bool(races)


def test_a_barrier_may_be_a_kernels_last_instruction() -> None:
    body = "setp.lt.u32 %p1, %r0, 32; @%p1 bra E; mov.u32 %r1, 1; E: "
    text = TEXT.format(outer="", declared="", block=64, body=body)
    text = text.replace("    ret;\n", "    bar.sync 0;\n").replace("st.global", "@!%p1 st.global")
    to = torch.zeros(64, dtype=torch.int32)
    emulate(PtxLaunch(text, "k", (64, 1, 1)), (1,), [to], seed=2)
    assert to.tolist() == [0] * 32 + [1] * 32


ARRIVE = """mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r3, %r2, %r3; mov.u32 %r1, 0; setp.lt.u32 %p1, %r0, 32;
    setp.ge.u32 %p2, %r0, 64; @!%p1 bra WAITS; {} bra END; WAITS: {} END:"""
READ = "sub.u32 %r4, %r3, {}; ld.shared.u32 %r1, [%r4];"


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_a_named_barrier_orders_what_came_before_the_arrival_for_those_who_wait_there(seed: int) -> None:
    store, arrive, wait = "st.shared.u32 [%r3], %r0;", "bar.arrive 1, 64;", "bar.sync 1, 64;"
    given: dict[str, Any] = {"declared": SHARED, "seed": seed, "checks": Checks(uninitialised=False)}
    assert kinds(ARRIVE.format(store + arrive, wait + READ.format(128)), block=64, **given) == []
    assert len(kinds(ARRIVE.format(arrive + store, wait + READ.format(128)), block=64, **given)) == 1
    other = f"@!%p2 bra SECOND; bar.arrive 2, 64; {wait} {READ.format(256)} bra END; SECOND: bar.sync 2, 64;"
    found = launch(ARRIVE.format(store + arrive, other + READ.format(128)), block=96, **given)[1].races
    assert any("wrote it in warp 0" in race and "read it in warp 1" in race for race in found)


# Clusters


def test_the_ctas_of_a_cluster_keep_their_ranks_whatever_the_order_asked_for() -> None:
    body = ADDRESSES + f"st.shared.u32 [%r4], %r6; {BARRIER} ld.shared::cluster.u32 %r1, [%r8]; {BARRIER}"
    for ctas in ((0, 1), (1, 0)):
        assert launch(body, ctas=ctas, **PAIR)[0] == [1] * 32 + [0] * 32


def test_shared_memory_of_others_is_reached_as_such_only_while_they_run() -> None:
    body = ADDRESSES + f"st.shared.u32 [%r4], %r6; {BARRIER} "
    assert "lie outside the 1024 there" in error(body + "ld.shared.u32 %r1, [%r8];" + BARRIER, **PAIR)
    late = "setp.eq.u32 %p1, %r6, 1; @%p1 ret; mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 9;"
    late += "@%p2 bra L; bar.sync 0; ld.shared::cluster.u32 %r1, [%r8];"
    assert "CTA 1, which has ended" in error(body + late, **PAIR)


@pytest.mark.parametrize("grid", [1, 4])
def test_a_wild_address_is_no_other_ctas_memory(grid: int) -> None:
    body = "mov.u32 %r2, 0x1000000; st.shared.u32 [%r2], %r0;"
    assert "lie outside the 1024 there" in error(body, declared=SHARED, grid=grid)
