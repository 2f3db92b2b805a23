"""Memory, atomics, counts, and loops without an end, in kernels of a few PTX lines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from ptx_lines import SHARED, error, launch

from rooflab.bench.emulator.machine.run import Checks

LOCAL = ".local .align 16 .b8 l[64];"

# Memory


@pytest.mark.parametrize(("space", "declared"), [("local", ".local .align 16 .b8 s[64];"), ("shared", SHARED)])
def test_a_generic_address_far_behind_a_window_does_not_come_back(space: str, declared: str) -> None:
    body = f"mov.u64 %d3, s; cvta.{space}.u64 %d4, %d3; add.u64 %d4, %d4, 0x200000000000; st.u32 [%d4], %r0;"
    assert "lie outside" in error(body, declared=declared)


def test_a_pointer_may_mean_another_space_in_every_lane() -> None:
    body = """mul.wide.u32 %d6, %r0, 4; mov.u64 %d3, s; cvta.shared.u64 %d3, %d3; add.u64 %d3, %d3, %d6;
        mov.u64 %d4, l; cvta.local.u64 %d4, %d4; add.u64 %d5, %d2, 128; rem.u32 %r2, %r0, 3;
        setp.eq.u32 %p1, %r2, 0; selp.b64 %d6, %d3, %d4, %p1; setp.eq.u32 %p2, %r2, 1; selp.b64 %d6, %d5, %d6, %p2;
        st.u32 [%d6], %r0; ld.u32 %r1, [%d6];
        isspacep.shared %p3, %d6; @%p3 add.u32 %r1, %r1, 100; isspacep.global %p3, %d6; @%p3 add.u32 %r1, %r1, 200;
        isspacep.local %p3, %d6; @%p3 add.u32 %r1, %r1, 300;"""
    found, result = launch(body, declared=SHARED + LOCAL, to=torch.zeros(64, dtype=torch.int32))
    assert found[:32] == [lane + 100 * (1 + lane % 3) for lane in range(32)] and result.races == ()
    assert found[32:] == [lane * (lane % 3 == 1) for lane in range(32)]


def test_a_read_of_local_memory_that_its_thread_has_not_written_is_an_error() -> None:
    text = error("setp.lt.u32 %p1, %r0, 5; @%p1 st.local.u32 [l+4], %r0; ld.local.u32 %r1, [l+4];", declared=LOCAL)
    assert "thread 5: a read of local memory at 0x4, which the thread has not written" in text
    assert launch("st.local.u32 [l+4], %r0; ld.local.u32 %r1, [l+4];", declared=LOCAL)[0] == list(range(32))
    unchecked = launch("ld.local.u32 %r1, [l];", declared=LOCAL, checks=Checks(False, False, False, False))[0]
    assert unchecked == [-1] * 32


def test_every_byte_of_a_vector_has_to_be_written() -> None:
    to = torch.zeros(64, dtype=torch.int32)
    body = "st.global.u32 [%d0], 1; st.global.u32 [%d0+8], 1; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0];"
    assert "a read of byte 4 of to" in error(body, to=to, written={to.data_ptr(): np.zeros(256, np.bool_)})


def test_some_lanes_load_a_vector_from_one_address() -> None:
    body = "setp.lt.u32 %p1, %r0, 5; mov.u32 %r1, 9; mov.u32 %r2, 9; @%p1 ld.global.v2.u32 {%r2, %r1}, [%d0+40];"
    assert launch(body, to=torch.arange(32, dtype=torch.int32))[0] == [11] * 5 + [9] * 27


def test_a_store_to_constant_memory_and_a_jump_to_nowhere_are_errors() -> None:
    assert "a store to constant memory" in error("st.const.u32 [%d2], %r0;")
    text = error("t: .branchtargets A, B; add.u32 %r2, %r0, 7; brx.idx %r2, t; A: mov.u32 %r1, 1; B:")
    assert "brx.idx wants an index from 0 to 1, got 38" in text


def test_a_value_from_a_lane_that_is_not_there_is_poison() -> None:
    body = "shfl.sync.bfly.b32 %r1, %r0, 8, 31, 0xffffffff;"
    assert launch(body, block=12)[0] == [8, 9, 10, 11, *[-1] * 4, 0, 1, 2, 3]


# Atomics


@pytest.mark.parametrize("operation", ["add.u32", "min.s32", "max.u32", "and.b32", "xor.b32", "inc.u32", "exch.b32"])
@pytest.mark.parametrize("places", [1, 3, 32])
@pytest.mark.parametrize(("space", "at"), [("shared", "%r2"), ("global", "%d3")])
def test_atomics_of_many_threads_go_one_by_one(space: str, at: str, operation: str, places: int) -> None:
    def step(old: int, given: int) -> int:
        name = operation.split(".", maxsplit=1)[0]
        if name == "inc":
            return 0 if old >= given else old + 1
        functions = {"add": old + given, "min": min(old, given), "max": max(old, given), "exch": given}
        return {**functions, "and": old & given, "xor": old ^ given}[name]

    memory, want = [5] * places, []
    for thread in range(96):
        want.append(memory[thread % places])
        memory[thread % places] = step(memory[thread % places], thread + 3)
    body = f"""mov.u32 %r2, s; rem.u32 %r3, %r0, {places}; shl.b32 %r3, %r3, 2; add.u32 %r2, %r2, %r3;
        cvt.u64.u32 %d3, %r3; add.u64 %d3, %d0, %d3; add.u64 %d3, %d3, 768;
        st.shared.u32 [%r2], 5; bar.sync 0; add.u32 %r4, %r0, 3; atom.{space}.{operation} %r1, [{at}], %r4;"""
    for grid in (1, 2) if space == "shared" else (1,):
        to = torch.full((300,), 5, dtype=torch.int32)
        found, _ = launch(body, declared=SHARED, block=96, grid=grid, to=to, checks=Checks(False, False, False, False))
        assert found[: 96 * grid] == want * grid


FLOATS = {
    "noftz.f16x2": (0x38003C00, 0x4C005000),
    "noftz.bf16x2": (0xBE803F80, 0xC1004200),
    "f64": (0x3FF0000000000000, 0x4040000000000000),
    "u64": (1 << 33, 32 << 33),
}
"""By the type: the bits of what each of 32 lanes adds, and of the sum: 0.5 and 1, -0.25 and 1, 1, and 2**33."""


@pytest.mark.parametrize("kind", FLOATS)
def test_atomics_add_every_wide_or_packed_type(kind: str) -> None:
    added, total = FLOATS[kind]
    width = 64 if "64" in kind else 32
    register = "%d4" if width == 64 else "%r4"
    to = torch.zeros(64, dtype=torch.int32)
    launch(f"mov.b{width} {register}, {added:#x}; red.global.add.{kind} [%d0+128], {register}; mov.u32 %r1, 0;", to=to)
    assert int(to.numpy().view(np.uint64)[16]) == total


def test_an_atomic_on_local_memory_is_an_error() -> None:
    body = "mov.u64 %d3, l; cvta.local.u64 %d4, %d3; st.u32 [%d4], %r0; atom.add.u32 %r1, [%d4], 1;"
    assert "neither global nor shared" in error(body, declared=LOCAL)


# Sums of subnormals: in global memory they become zeros of their sign, in shared memory they stay (9.7.13.5)

TINY, LEAST_NORMAL = 0x00000005, 0x00800000
SIGN = 0x80000000


def sums(space: str, start: int, adds: list[int]) -> list[int]:
    """What each lane finds at a place where `start` was, and what is left there last: lane i adds the i-th bits."""
    given = np.array([*adds, *[0] * (32 - len(adds))], np.uint32)
    to = torch.from_numpy(np.r_[given, np.array([start], np.uint32)].view(np.int32))
    at = {"global": "%d3", "shared": "%r2", "": "%d3", "::shared": "%d4"}[space]
    dot = "" if space in ("", "::shared") else f".{space}"
    put = f"atom{dot}.add.f32 %f2, [{at}], %f1;"
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


# Counts


def test_sectors_are_counted_by_the_warps_that_ask() -> None:
    body = """mov.u32 %r3, 0; and.b32 %r4, %r0, 1; mul.wide.u32 %d3, %r4, 4; add.u64 %d3, %d0, %d3;
        L: shl.b32 %r5, %r3, 4; sub.u32 %r6, %r0, %r5; setp.ge.u32 %p1, %r6, 32; @%p1 bra N;
        ld.global.u32 %r1, [%d3];
        N: add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 2; @%p2 bra L;"""
    result = launch(body, block=64, checks=Checks(races=False))[1]
    assert result.bytes.global_read_sectors == 32 * (1 + 2)


def test_one_thread_that_stores_sixteen_bytes_takes_one_turn() -> None:
    body = "mov.u32 %r2, s; @%p0 st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};"
    assert launch(body, declared=SHARED)[1].shared_wavefronts == 1


# Waiting

WAIT = "W: ld.volatile.global.u32 %r1, [%d3]; setp.eq.u32 %p3, %r1, 0; @%p3 bra W;"
LOOK = "L: ld.volatile.global.u32 %r2, [%d3]; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 9; @%p2 bra L;"


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    ("body", "all_have", "there"),
    [
        # Lane 0 of each warp sets what its others wait for; a cluster waits for one that looks without a change.
        (f"@%p0 bra S; {WAIT} bra E; S: st.volatile.global.u32 [%d3], 7; mov.u32 %r1, 7; E:", 7, [7, 0]),
        (f"@%p1 bra W; {LOOK} st.volatile.global.u32 [%d3], 7; {WAIT}", 7, [7, 0]),
        # A lock lets one CTA in at a time.
        (
            "@!%p0 bra E; L: atom.global.cas.b32 %r2, [%d3], 0, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra L;"
            " fence.acq_rel.gpu; ld.global.u32 %r4, [%d3+4]; add.u32 %r4, %r4, 1; st.global.u32 [%d3+4], %r4;"
            " fence.acq_rel.gpu; atom.global.exch.b32 %r2, [%d3], 0; E:",
            0,
            [0, 4],
        ),
    ],
)
def test_who_waits_gets_what_others_do(body: str, all_have: int, there: list[int], seed: int) -> None:
    start = "add.u64 %d3, %d0, 512; mov.u32 %r1, 0; mov.u32 %r3, 0; setp.lt.u32 %p1, %r31, 2;"
    to = torch.zeros(130, dtype=torch.int32)
    found, result = launch(start + body, to=to, cluster=(2, 1, 1), grid=4, seed=seed)
    assert found == [all_have] * 128 + there and result.races == ()


@pytest.mark.parametrize("turn", ["", "add.u32 %r1, %r1, 1; rem.u32 %r1, %r1, 3; setp.lt.u32 %p1, %r1, 9; @%p1"])
def test_a_loop_that_nothing_can_end_is_an_error(turn: str) -> None:
    assert "all wait for what nobody writes" in error(f"mov.u32 %r1, 0; L: {turn} bra L;")


def test_a_long_loop_and_one_that_looks_at_the_clock_end() -> None:
    body = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 20000; @%p1 bra L;"
    assert launch(body)[0] == [20000] * 32
    body = (
        "mov.u32 %r2, %clock; L: mov.u32 %r3, %clock; sub.u32 %r3, %r3, %r2; setp.lt.u32 %p1, %r3, 20000; @%p1 bra L;"
    )
    launch(body + "mov.u32 %r1, 1;")


VIEWS = [
    (lambda x: x[:2], 32, 128, 256, "[2, 32] and strides [32, 1]"),
    (lambda x: x.view(2, 64)[:, :32], 32, 256, 128, "[2, 32] and strides [64, 1]"),
    (lambda x: x.view(2, 64)[:, :31], 16, 256, 64, "[2, 31] and strides [64, 1]"),
    (lambda x: x[::2], 32, 256, 128, "[2, 32] and strides [64, 1]"),
    (lambda x: x.t()[:16], 16, 128, 64, "[16, 4] and strides [1, 32]"),
]
"""A view of 4 times 32 elements, the threads, a byte from which on they read inside of it, and one outside."""


@pytest.mark.parametrize(("view", "block", "inside", "outside", "shape"), VIEWS)
def test_an_access_stays_among_the_elements_of_the_view_on_request(
    view: Callable[[torch.Tensor], torch.Tensor], block: int, inside: int, outside: int, shape: str
) -> None:
    given = view(x := torch.zeros(4, 32, dtype=torch.int32))
    body, more = "ld.global.u32 %r1, [%d2+{}];", {"block": block, "to": given}
    launch(body.format(inside), views=True, **more)
    launch(body.format(outside), **more)
    launch(body.format(outside), views=True, memory=[x], **more)  # another view has the elements
    said = error(body.format(outside), views=True, **more)
    assert "[out-of-bounds]" in said and "4 bytes out of the view of shape " + shape in said
