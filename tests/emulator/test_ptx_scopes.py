"""What orders, races and counts for other CTAs and proxies: strong loads, scopes, atomics, the kinds of fences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_lines import SHARED, launch

ORDERS = pytest.mark.parametrize("seed", [0, 3])
FIRST = "setp.eq.u32 %p1, %r31, 0; add.u64 %d3, %d0, 256; mul.wide.u32 %d4, %r0, 4; add.u64 %d4, %d3, %d4; "
"""%p1 in the first CTA; %d3 is what follows the results of two CTAs, %d4 the thread's own word of it."""


def races(body: str, **more: Any) -> list[str]:
    """Those of two CTAs of 32 threads."""
    to = torch.zeros(96, dtype=torch.int32)
    return [str(race) for race in launch(FIRST + "mov.u32 %r1, 0;" + body, to=to, grid=2, **more)[1].races]


@ORDERS
def test_two_loads_do_not_race_however_strong_one_of_them_is(seed: int) -> None:
    assert races("@%p1 ld.global.u32 %r1, [%d4]; @!%p1 ld.volatile.global.u32 %r1, [%d4];", seed=seed) == []


@ORDERS
def test_a_load_of_a_flag_releases_nothing(seed: int) -> None:
    body = """@!%p0 bra END; @!%p1 bra READ;
        st.global.u32 [%d3+64], 5; fence.acq_rel.gpu; ld.relaxed.gpu.global.u32 %r1, [%d3]; bra END;
        READ: ld.acquire.gpu.global.u32 %r1, [%d3]; ld.global.u32 %r2, [%d3+64]; END: bar.sync 0;"""
    (found,) = races(body, seed=seed)
    assert "byte 320 of to" in found


@ORDERS
def test_what_has_the_scope_of_a_cta_races_with_another(seed: int) -> None:
    count = "mov.u32 %r2, 1; red.relaxed.cta.global.add.u32 [{}], %r2;"
    (found,) = races(count.format("%d3"), seed=seed)
    assert "write-write race on global memory" in found
    assert races(count.format("%d2"), seed=seed) == []
    pair = "@!%p0 bra END; @%p1 st.relaxed.cta.global.u32 [%d3], 1; @!%p1 ld.relaxed.cta.global.u32 %r1, [%d3]; END:"
    (found,) = races(pair, seed=seed)
    assert "race on global memory, byte 256 of to" in found


@ORDERS
@pytest.mark.parametrize("one", ["st.global.u32 [%d4], {};", "st.global.v2.u32 [%d6], {{{}, 5}};"])
def test_two_ctas_may_store_one_value_but_not_two(seed: int, one: str) -> None:
    """By one instruction or by two; a lane of one of the CTAs that stores another value is enough for a race."""
    first = "setp.gt.u32 %p2, %r0, 15; @%p2 bra END; mul.wide.u32 %d6, %r0, 8; add.u64 %d6, %d3, %d6; "
    assert races(first + one.format("%r0") + "END:", seed=seed) == []
    assert races(first + f"@%p1 {one.format('%r0')} @!%p1 {one.format('%r0')} END:", seed=seed) == []
    other = "setp.eq.u32 %p3, %r30, 37; @%p3 mov.u32 %r0, 77; "
    (found,) = races(first + other + one.format("%r0") + "END:", seed=seed)
    assert "write-write race on global memory" in found and "same value" not in found


@ORDERS
def test_a_store_races_with_an_atomic_that_left_its_value(seed: int) -> None:
    """In the other order the atomic adds to what was stored."""
    body = "mov.u32 %r2, 1; @!%p0 bra END; @%p1 red.global.add.u32 [%d3], %r2; @!%p1 st.global.u32 [%d3], 1; END:"
    (found,) = races(body, seed=seed)
    assert "same value" not in found


def test_atomics_move_what_they_change() -> None:
    body = """mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; mov.u32 %r5, 1; mul.wide.u32 %d4, %r0, 4;
        add.u64 %d4, %d0, %d4; st.shared.u32 [%r4], 0; bar.sync 0; red.shared.add.u32 [%r4], %r5; bar.sync 0;
        ld.shared.u32 %r6, [%r4]; red.global.add.u32 [%d4+384], %r6; mov.u32 %r1, 0;"""
    to = torch.zeros(128, dtype=torch.int32)
    moved = launch(body, declared=SHARED, to=to, grid=3)[1].bytes
    assert to[96:].tolist() == [3] * 32 and moved.atomic == 3 * 32 * 4
    assert moved.hbm_read == 128 and moved.hbm_write == 128 + 3 * 128, "each sector once"
    assert moved.shared_read == 3 * 2 * 128 and moved.shared_write == 3 * 2 * 128


@pytest.mark.parametrize(
    ("fence", "misses"),
    [
        ("fence.proxy.async;", False),
        ("fence.proxy.async.shared::cta;", False),
        ("fence.mbarrier_init.release.cluster;", True),
        ("fence.proxy.async.global;", True),
    ],
)
def test_only_a_proxy_fence_orders_stores_before_a_bulk_copy(fence: str, misses: bool) -> None:
    body = f"""mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; st.shared.u32 [%r4], %r0; {fence} bar.sync 0;
        @!%p0 bra END; cp.async.bulk.global.shared::cta.bulk_group [%d0+128], [%r2], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END: mov.u32 %r1, 0;"""
    found = launch(body, declared=SHARED, to=torch.zeros(64, dtype=torch.int32))[1].races
    assert bool(found) == misses
    assert all("with no fence.proxy.async between" in race for race in found)
