"""Copies in flight: the meaning of a wait, for copies that write global memory and for copies of single lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_lines import SHARED, error, launch

STORE = """
    mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; add.u32 %r5, %r0, 100; st.shared.u32 [%r4], %r5;
    fence.proxy.async; bar.sync 0;
    add.u64 %d3, %d0, 256;
    @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r2], 128;
    @%p0 cp.async.bulk.commit_group;
"""
"""100, 101 and so on to the words from the 64th on."""
PASSED_ON = """
    add.u64 %d4, %d0, 512; setp.eq.u32 %p1, %r31, 0; @!%p1 bra READ;
    {store} {wait}
    bar.sync 0; fence.acq_rel.gpu; @%p0 st.relaxed.gpu.global.u32 [%d4], 1; mov.u32 %r1, 0; bra END;
    READ: ld.acquire.gpu.global.u32 %r6, [%d4]; setp.eq.u32 %p2, %r6, 0; @%p2 bra READ;
    add.u64 %d5, %d0, 256; mul.wide.u32 %d6, %r0, 4; add.u64 %d5, %d5, %d6; ld.global.u32 %r1, [%d5];
    END:
"""
ALL, READ = "@%p0 cp.async.bulk.wait_group 0;", "@%p0 cp.async.bulk.wait_group.read 0;"


def passed_on(wait: str, seed: int) -> tuple[list[int], list[str]]:
    """What a second CTA reads after a flag, and the races."""
    to = torch.zeros(132, dtype=torch.int32)
    found, result = launch(PASSED_ON.format(store=STORE, wait=wait), declared=SHARED, grid=2, to=to, seed=seed)
    assert found[64:96] == list(range(100, 132)), "in the end it is there"
    return found[32:64], [str(race) for race in result.races]


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_was_read_does_not_mean_that_the_target_was_written(seed: int) -> None:
    assert passed_on(ALL, seed) == (list(range(100, 132)), [])
    _, races = passed_on(READ, seed)
    assert len(races) == 1 and "race on global memory" in races[0] and "cp.async.bulk.global" in races[0]
    assert passed_on(READ + ALL, seed) == (list(range(100, 132)), [])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wait", [ALL, READ, ""])
def test_a_source_may_be_written_again_when_it_was_read(wait: str, seed: int) -> None:
    to = torch.zeros(132, dtype=torch.int32)
    body = f"{STORE} {wait} bar.sync 0; st.shared.u32 [%r4], 7; mov.u32 %r1, 0; {ALL}"
    found, result = launch(body, declared=SHARED, to=to, seed=seed)
    assert bool(result.races) == (not wait)
    assert not wait or found[64:96] == list(range(100, 132))


def test_groups_are_counted_the_same_by_both_waits() -> None:
    again = """mov.u32 %r7, 0;
        L: st.shared.u32 [%r4], %r7; fence.proxy.async; bar.sync 0;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r2], 128; @%p0 cp.async.bulk.commit_group;
        @%p0 cp.async.bulk.wait_group.read 0; bar.sync 0;
        add.u32 %r7, %r7, 1; setp.lt.u32 %p3, %r7, 5; @%p3 bra L;
        @%p0 cp.async.bulk.wait_group 1; bar.sync 0;
        add.u64 %d5, %d3, 0; mul.wide.u32 %d6, %r0, 4; add.u64 %d5, %d5, %d6; ld.global.u32 %r1, [%d5];"""
    to = torch.zeros(132, dtype=torch.int32)
    found, _ = launch(STORE + READ + "bar.sync 0;" + again, declared=SHARED, to=to)
    assert found[:32] == [3] * 32 and found[64:96] == [4] * 32


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("guard", ["setp.lt.u32 %p1, %r0, 32", "and.b32 %r9, %r0, 1; setp.eq.u32 %p1, %r9, 0"])
def test_copies_of_one_instruction_arrive_in_parts(guard: str, seed: int) -> None:
    body = f"""
        mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; add.u32 %r5, %r2, 512;
        add.u64 %d3, %d2, 256; @%p0 mbarrier.init.shared.b64 [%r5], 64; bar.sync 0;
        cp.async.ca.shared.global [%r4], [%d3], 4;
        {guard}; @!%p1 bra OTHER;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r5]; bra W;
        OTHER: cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0; @!%p2 bra W;
        xor.b32 %r6, %r3, 252; add.u32 %r6, %r6, %r2; ld.shared.u32 %r1, [%r6];"""
    to = torch.cat([torch.zeros(64), torch.arange(64)]).to(torch.int32)
    found, result = launch(body, declared=SHARED, block=64, to=to, seed=seed)
    assert found[:64] == list(range(63, -1, -1)) and result.races == ()


def test_a_cta_that_ends_before_its_copies_have_read_is_an_error() -> None:
    text = error(STORE + "mov.u32 %r1, 0;", declared=SHARED, to=torch.zeros(132, dtype=torch.int32))
    assert "the CTA ended while this copy may still read its shared memory" in text


def test_a_reduction_over_two_tensors_is_one_step_in_each() -> None:
    whole = np.zeros(128, np.int32)
    near, far = torch.from_numpy(whole[:96]), torch.from_numpy(whole[96:])
    body = """mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3; st.shared.u32 [%r4], %r0; mov.u32 %r1, 0;
        fence.proxy.async; bar.sync 0; add.u64 %d3, %d0, 320;
        @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d3], [%r2], 128;
        @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group 0;"""
    _, result = launch(body, declared=SHARED, grid=2, to=near, memory=[far])
    assert whole[80:112].tolist() == [2 * at for at in range(32)]
    assert result.races == ()
