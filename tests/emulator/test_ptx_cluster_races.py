"""Shared and global memory between the CTAs of a cluster: which actors are distinct, and what orders them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_lines import SHARED, launch

from rooflab.bench.emulator import EmulationError
from rooflab.bench.emulator.results import LaunchResult

BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
SEEDS = pytest.mark.parametrize("seed", range(3))
PLACES = f"""
    mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; add.u32 %r20, %r2, 896; add.u32 %r21, %r2, 904;
    mov.u32 %r6, %cluster_ctarank; xor.b32 %r7, %r6, 1; setp.eq.u32 %p1, %r6, 0; mov.u32 %r1, 0;
    mapa.shared::cluster.u32 %r8, %r4, %r7; mapa.shared::cluster.u32 %r22, %r20, %r7;
    mapa.shared::cluster.u32 %r23, %r21, %r7; mapa.shared::cluster.u32 %r24, %r2, %r7;
    @%p0 mbarrier.init.shared.b64 [%r20], 32; @%p0 mbarrier.init.shared.b64 [%r21], 1;
    fence.mbarrier_init.release.cluster; {BARRIER}
"""
"""%r4 is the thread's word and %r8 the other CTA's; mbarriers of 32 (%r20, there %r22) and of 1 (%r21, there %r23)."""
TELL = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];"
WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r20], 0; @!%p2 bra W;"
END = f"END: {BARRIER}"


def run(body: str, **more: Any) -> tuple[list[int], LaunchResult]:
    """A cluster of two CTAs of 32 threads."""
    return launch(PLACES + body, declared=SHARED, cluster=(2, 1, 1), grid=2, **more)


def races(body: str, **more: Any) -> list[str]:
    """What is reported of such a cluster."""
    return [str(race) for race in run(body, **more)[1].races]


@SEEDS
def test_a_remote_arrival_orders_what_was_stored_before_it(seed: int) -> None:
    body = "@!%p1 bra READ; {} bra END; READ: {} ld.shared.u32 %r1, [%r4];"
    store = "st.shared::cluster.u32 [%r8], %r0;"
    assert races(body.format(store + TELL, WAIT) + END, seed=seed) == []
    (found,) = races("st.shared.u32 [%r4], %r0;" + BARRIER + body.format(TELL + store, WAIT) + END, seed=seed)
    assert "warp 0 of CTA 0" in found and "warp 0 of CTA 1" in found


@SEEDS
@pytest.mark.parametrize(("fence", "clean"), [("fence.mbarrier_init.release.cluster;", True), ("", False)])
def test_a_fence_and_a_relaxed_arrival_publish_mbarriers_and_nothing_else(fence: str, clean: bool, seed: int) -> None:
    again = "@%p0 mbarrier.inval.shared.b64 [%r20]; @%p0 mbarrier.init.shared.b64 [%r20], 32; st.shared.u32 [%r4], 7;"
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    body = f"{again} {fence} {relaxed} {TELL} {{}} {BARRIER}"
    assert (races(body.format(""), seed=seed) == []) == clean
    (found,) = races(body.format("ld.shared::cluster.u32 %r1, [%r8];"), seed=seed) if clean else ("ld.shared::cluster",)
    assert "ld.shared::cluster" in found


STAY = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
MULTICAST = """mov.b16 %h0, 3; @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r2], [%d0], 128, [%r21], %h0;"""
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r21], 128;"
FILLED = f"{EXPECT} bar.sync 0; @!%p1 bra V; {MULTICAST} V: {STAY} %p2, [%r21], 0; @!%p2 bra V;"
LEAVES = [
    ("@%p1 ld.shared::cluster.u32 %r1, [%r8];", BARRIER),
    (f"@%p1 {TELL}", f"@%p1 bra END; {WAIT} END: bar.sync 0;"),
    (f"@%p1 ld.shared::cluster.u32 %r1, [%r8]; @%p1 {TELL}", f"@%p1 bra END; {WAIT} END: bar.sync 0;"),
    ("@%p1 st.shared::cluster.u32 [%r8], %r0;", BARRIER),
    (FILLED.replace("V: ", "V: @!%p1 bra END; ") + "END: bar.sync 0;", ""),
]


@SEEDS
@pytest.mark.parametrize(("access", "rest"), LEAVES)
def test_a_cta_stays_until_no_other_uses_its_shared_memory(access: str, rest: str, seed: int) -> None:
    start = f"st.shared.u32 [%r4], %r0; fence.proxy.async; {BARRIER}"
    body = start + access
    try:
        rules = {finding.rule for finding in run(body, seed=seed)[1].findings}
    except EmulationError as error:
        rules = {error.fault.rule}
    assert rules == {"early-exit"}
    right = body + rest if rest else start + FILLED
    assert races(right, seed=seed) == []


@SEEDS
def test_warps_of_one_number_in_two_ctas_are_told_apart(seed: int) -> None:
    (found,) = races("@%p1 st.shared::cluster.u32 [%r8], 77; @!%p1 st.shared.u32 [%r4], %r0;" + BARRIER, seed=seed)
    assert "write-write race on shared memory at 0x0 (CTA 1)" in found
    assert "warp 0 of CTA 0" in found and "warp 0 of CTA 1" in found
    both = "@%p1 st.shared::cluster.u32 [%r8], 77;" + BARRIER + "@!%p1 st.shared.u32 [%r4], %r0;" + BARRIER
    assert races(both, seed=seed) == []


COPY = """fence.proxy.async; @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
    [%r24], [%r2], 128, [%r23];"""
TAKEN = """@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r21], 128;
    V: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r21], 0; @!%p3 bra V;"""


@SEEDS
def test_a_copy_into_another_cta_knows_what_its_issuer_knows(seed: int) -> None:
    body = f"""add.u32 %r9, %r30, 5; st.shared.u32 [%r4], %r9; bar.sync 0; @%p1 bra SEND;
        ld.shared.u32 %r1, [%r4]; {TELL} {TAKEN} ld.shared.u32 %r1, [%r4]; bra END;
        SEND: {{}} {COPY} {END}"""
    found, result = run(body.format(WAIT), seed=seed)
    assert found[32:] == list(range(5, 37)) and result.races == ()
    found = races(body.format(""), seed=seed)
    assert any("a TMA load" in race and "of CTA 1" in race for race in found)


@SEEDS
def test_stores_that_tell_an_mbarrier_reach_the_other_cta(seed: int) -> None:
    expect, wait = TAKEN.split(";", 1)
    send = """add.u32 %r9, %r30, 5;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r8], %r9, [%r23];"""
    body = f"{expect}; {BARRIER} {send} {{}} ld.shared.u32 %r1, [%r4]; {BARRIER}"
    found, result = run(body.format(wait), seed=seed)
    assert found == [*range(37, 69), *range(5, 37)] and result.races == ()
    early = "st.shared.u32 [%r4], 7;" + body.format("") + wait.replace("V", "U")
    assert any("st.async" in race for race in races(early, seed=seed))


@SEEDS
def test_atomics_reach_another_ctas_shared_memory_by_a_generic_address(seed: int) -> None:
    body = f"""mov.u64 %d3, s; cvta.shared.u64 %d3, %d3; mapa.u64 %d4, %d3, 0; st.shared.u32 [%r4], 0; {BARRIER}
        atom.add.u32 %r9, [%d4], 1; {BARRIER} ld.u32 %r1, [%d4]; {BARRIER}"""
    found, result = run(body, seed=seed)
    assert found == [64] * 64 and result.races == ()


@SEEDS
def test_a_clusters_barrier_orders_global_memory_too(seed: int) -> None:
    body = f"""st.global.u32 [%d2], %r30; {{}} xor.b32 %r9, %r30, 63; mul.wide.u32 %d3, %r9, 4; add.u64 %d3, %d0, %d3;
        ld.global.u32 %r1, [%d3]; {BARRIER}"""
    found, result = run(body.format(BARRIER), seed=seed)
    assert found == list(range(63, -1, -1)) and result.races == ()
    assert any(
        "write-read race on global memory" in race or "read-write race on global memory" in race
        for race in races(body.format(""), seed=seed)
    )


@SEEDS
def test_a_remote_arrival_orders_global_memory_too(seed: int) -> None:
    body = "@!%p1 bra READ; {} bra END; READ: {} add.u64 %d3, %d0, 128; ld.global.u32 %r1, [%d3];" + END
    store = "add.u64 %d3, %d0, 128; @%p0 st.global.u32 [%d3], 5;"
    to = torch.zeros(64, dtype=torch.int32)
    again = "END: bar.sync 0;"
    assert races(body.format(store + TELL, WAIT).replace("END:", again), to=to, seed=seed) == []
    (found,) = races(body.format(TELL + store, WAIT).replace("END:", again), to=to, seed=seed)
    assert "race on global memory" in found


@pytest.mark.parametrize(("cluster", "block"), [(4, 384), (16, 64), (8, 256)])
def test_large_clusters_are_watched_whole(cluster: int, block: int) -> None:
    given: dict[str, Any] = {"declared": SHARED, "cluster": (cluster, 1, 1), "block": block, "grid": cluster}
    start = "mov.u32 %r2, s; mov.u32 %r1, 0; mov.u32 %r8, %cluster_ctarank; mapa.shared::cluster.u32 %r5, %r2, 0;"
    last = f"setp.eq.u32 %p1, %r8, {cluster - 1}; and.pred %p1, %p1, %p0; @%p1 st.shared::cluster.u32 [%r5], 77;"
    read = f"setp.eq.u32 %p2, %r30, {block - 1}; @%p2 ld.shared.u32 %r1, [%r2];"
    assert launch(start + last + BARRIER + read + BARRIER, **given)[1].races == ()
    init = "setp.eq.u32 %p3, %r30, 0; @%p3 st.shared.u32 [%r2], 1;" + BARRIER
    (found,) = launch(start + init + last + read + BARRIER, **given)[1].races
    assert f"warp 0 of CTA {cluster - 1}" in found and f"warp {block // 32 - 1} of CTA 0" in found


HANDED_OVER = """
    add.u64 %d3, %d0, 1024; add.u64 %d4, %d0, 1040; setp.eq.u32 %p1, %r31, 0; setp.eq.u32 %p2, %r31, {reader};
    mov.u32 %r1, 0; mov.u32 %r9, 1;
    @!%p1 bra READ; @%p0 st.global.u32 [%d3], 5; bar.sync 0; {before} @%p0 {release} bra END;
    READ: @!%p2 bra END;
    W: {acquire} setp.eq.u32 %p3, %r10, 0; @%p3 bra W; {after} ld.global.u32 %r1, [%d3];
    END: bar.sync 0;
"""


def handed_over(reader: int, cluster: int, **given: str) -> list[str]:
    """The races when CTA 0 hands a word to CTA `reader` of four."""
    said = {
        "before": "",
        "release": "atom.add.release.gpu.global.u32 %r11, [%d4], %r9;",
        "after": "",
        "acquire": "ld.acquire.gpu.global.u32 %r10, [%d4];",
        **given,
    }
    body = HANDED_OVER.format(reader=reader, **said)
    runs = [
        launch(body, cluster=(cluster, 1, 1), grid=4, to=torch.zeros(512, dtype=torch.int32), seed=seed)
        for seed in range(2)
    ]
    found = [set(map(str, result.races)) for _, result in runs]
    assert all(bool(other) == bool(found[0]) for other in found)
    return sorted(found[0])


NEAR = {
    "release": "atom.add.release.cluster.global.u32 %r11, [%d4], %r9;",
    "acquire": "ld.acquire.cluster.global.u32 %r10, [%d4];",
}
FENCES = {
    "release": "st.relaxed.gpu.global.u32 [%d4], 1;",
    "acquire": "ld.relaxed.gpu.global.u32 %r10, [%d4];",
    "before": "fence.acq_rel.cluster;",
    "after": "fence.acq_rel.cluster;",
}


WIDE = {"before": "fence.acq_rel.gpu;", "after": "fence.acq_rel.gpu;"}


@pytest.mark.parametrize(
    "given", [*({part: NEAR[part]} for part in NEAR), NEAR, *({**FENCES, part: WIDE[part]} for part in WIDE), FENCES]
)
def test_what_has_the_clusters_scope_orders_its_ctas_alone(given: dict[str, str]) -> None:
    assert handed_over(1, 2, **given) == []
    assert any("wrote it in CTA 0" in race or "read it in CTA 2" in race for race in handed_over(2, 2, **given))
    assert handed_over(2, 4, **given) == []
    assert handed_over(1, 1, **given), "a CTA without a cluster is one of its own"
    assert handed_over(2, 2, **{**FENCES, **WIDE}) == []


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_atomics_of_the_clusters_scope_race_with_those_of_another(cluster: int) -> None:
    body = "mov.u32 %r9, 1; mov.u32 %r1, 0; add.u64 %d3, %d0, 1024; @%p0 red.relaxed.{}.global.add.u32 [%d3], %r9;"
    to = torch.zeros(512, dtype=torch.int32)
    more: dict[str, Any] = {"cluster": (cluster, 1, 1), "grid": 4, "to": to}
    assert launch(body.format("gpu"), **more)[1].races == ()
    assert bool(launch(body.format("cluster"), **more)[1].races) == (cluster < 4)
    half = "setp.eq.u32 %p1, %r31, 0; @%p1 bra ONE;" + body.format("gpu") + "bra END; ONE:" + body.format("cluster")
    assert bool(launch(half + "END: bar.sync 0;", **more)[1].races) == (cluster < 4)
