"""`atom.add.f32`: in global memory subnormals become zeros of their sign, in shared memory they stay (9.7.13.5)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_lines import SHARED, launch

TINY, LEAST_NORMAL = 0x00000005, 0x00800000
SIGN = 0x80000000


def sums(space: str, start: int, adds: list[int], opcode: str = "atom") -> list[int]:
    """What each lane finds at a place where `start` was, and what is left there last: lane i adds the i-th bits."""
    given = np.array([*adds, *[0] * (32 - len(adds))], np.uint32)
    to = torch.from_numpy(np.r_[given, np.array([start], np.uint32)].view(np.int32))
    at = {"global": "%d3", "shared": "%r2", "": "%d3", "::shared": "%d4"}[space]
    dot = "" if space in ("", "::shared") else f".{space}"
    put = f"{opcode}{dot}.add.f32 {'%f2, ' if opcode == 'atom' else ''}[{at}], %f1;"
    body = f"""
        add.u64 %d3, %d0, 128; mov.u32 %r2, s; cvt.u64.u32 %d4, %r2; cvta.shared.u64 %d4, %d4;
        ld.global.u32 %r3, [%d3]; @%p0 st.shared.u32 [%r2], %r3; bar.sync 0;
        ld.global.f32 %f1, [%d2]; mov.f32 %f2, 0f00000000;
        setp.lt.u32 %p1, %r0, {len(adds)}; @%p1 {put} bar.sync 0;
        mov.b32 %r1, %f2; ld.shared.u32 %r4, [%r2]; setp.eq.u32 %p2, %r0, 31;
        @%p2 {"mov.u32 %r1, %r4" if "shared" in space else "ld.global.u32 %r1, [%d3]"};"""
    found, _ = launch(body, declared=SHARED, to=to)
    return [value % (1 << 32) for value in (*found[: len(adds)], found[31])]


@pytest.mark.parametrize("space", ["global", ""])
def test_subnormals_become_zeros_in_global_memory(space: str) -> None:
    assert sums(space, TINY, [0]) == [TINY, 0]
    assert sums(space, SIGN | TINY, [SIGN | TINY]) == [SIGN | TINY, SIGN]
    assert sums(space, LEAST_NORMAL + 5, [SIGN | LEAST_NORMAL]) == [LEAST_NORMAL + 5, 0], "the sum is one"
    assert sums(space, 0, [TINY, TINY]) == [0, 0, 0]


@pytest.mark.parametrize("space", ["shared", "::shared"])
def test_subnormals_stay_in_shared_memory(space: str) -> None:
    assert sums(space, TINY, [0]) == [TINY, TINY]
    assert sums(space, LEAST_NORMAL + 5, [SIGN | LEAST_NORMAL]) == [LEAST_NORMAL + 5, 5]
    assert sums(space, 0, [TINY, TINY]) == [0, TINY, 2 * TINY]


def test_what_follows_a_subnormal_sum_is_added_to_zero() -> None:
    minus = SIGN | LEAST_NORMAL
    adds = [LEAST_NORMAL + 5, minus, LEAST_NORMAL, LEAST_NORMAL]
    twice = 0x01000000
    assert sums("global", 0, adds) == [0, LEAST_NORMAL + 5, 0, LEAST_NORMAL, twice]
    assert sums("shared", 0, adds) == [0, LEAST_NORMAL + 5, 5, LEAST_NORMAL + 5, twice + 2]
    assert sums("global", 0, adds, "red")[-1] == twice
