"""Copies and matrix instructions in PTX written by hand: who executes them, what is refused, and unusual forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.results import LaunchResult
from rooflab.bench.emulator.tiles.tensor_map import replace

ADDRESSES = """ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
mov.u32 %r20, sm; add.u32 %r21, %r20, 4096; setp.eq.u32 %p1, %r1, 0;"""
BARRIER = "@%p1 mbarrier.init.shared.b64 [%r21], 1; fence.proxy.async; bar.sync 0;"
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %p9, [%r21], 0; @!%p9 bra WAIT;"
BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


def run(
    body: str, *args: Any, grid: int = 1, block: int = 32, shared: int = 8192, version: str = "8.6", **more: Any
) -> LaunchResult:
    """Runs instructions as the body of a kernel with two pointers, `a` and `b`."""
    cluster = (more.pop("cluster", 1), 1, 1)
    text = f""".version {version}
    .target sm_90a
    .address_size 64
    .visible .entry k(.param .u64 a, .param .u64 b) {{
    .reg .b64 %rd<32>; .reg .b32 %r<64>; .reg .f32 %f<300>; .reg .b16 %h<4>; .reg .pred %p<16>;
    .shared .align 1024 .b8 sm[{shared}];
    {ADDRESSES} {body}
    ret; }}"""
    given = [torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args]
    return emulate(PtxLaunch(text, "k", (block, 1, 1), cluster=cluster), (grid,), given, **more)


def words(count: int = 1024) -> np.ndarray:
    """0, 1, 2 and so on, at a multiple of 128 bytes."""
    raw = np.zeros(4 * count + 128, np.uint8)
    start = -raw.ctypes.data % 128
    found = raw[start : start + 4 * count].view(np.uint32)
    found[:] = np.arange(count)
    return found


def refused(said: str, body: str, **more: Any) -> None:
    """The one line that it ends with."""
    with pytest.raises(EmulationError) as caught:
        run(body, words(), words(), **more)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# cp.async

PLACES = """shl.b32 %r3, %r1, 4; add.u32 %r4, %r20, %r3; mad.lo.u32 %r5, %r2, 32, %r1;
mul.wide.u32 %rd3, %r5, 16; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;"""
ROUND_TRIP = (
    PLACES
    + """st.global.v4.u32 [%rd4], {%r5, %r5, %r5, %r5}; bar.sync 0; {mul}
cp.async.cg.shared.global [%r4], [%rd4], 16; cp.async.wait_all;
ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4]; st.global.v4.u32 [%rd5], {%r10, %r11, %r12, %r13};"""
)


def test_a_copy_of_what_the_cta_itself_wrote_is_no_race_between_ctas() -> None:
    result = np.zeros(512, np.uint32)
    assert run(ROUND_TRIP.replace("{mul}", ""), words(), result, grid=4).races == ()
    assert (result.reshape(128, 4) == np.arange(128)[:, None]).all()


def test_a_copy_of_what_another_cta_wrote_is_a_race() -> None:
    first = "mul.wide.u32 %rd6, %r1, 16; add.s64 %rd4, %rd1, %rd6;"
    races = run(ROUND_TRIP.replace("{mul}", first), words(), words(), grid=4).races
    assert any("wrote it in CTA 0" in race and "cp.async" in race for race in races)


# Bulk copies and tensor maps


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_bulk_copy_is_ordered_as_the_warp_is_that_issued_it(seed: int) -> None:
    body = f"""{BARRIER} setp.eq.u32 %p2, %r2, 1; @%p2 bra READER;
    mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; st.global.u32 [%rd4], %r1; bar.sync 0; fence.proxy.async;
    @%p1 st.release.gpu.global.u32 [%rd2], 1;
    bra END;
    READER: setp.ne.u32 %p3, %r1, 32; @%p3 bra JOIN;
    POLL: ld.acquire.gpu.global.u32 %r5, [%rd2]; setp.eq.u32 %p4, %r5, 0; @%p4 bra POLL; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r21], 256;
    JOIN: bar.warp.sync 0xffffffff;
    @!%p3 {BULK} [%r20], [%rd1], 256, [%r21];
    {WAIT} END: bar.sync 0;"""
    assert run(body, words(), np.zeros(4, np.uint32), grid=2, block=64, seed=seed).races == ()


CLUSTER = f"""{BARRIER} barrier.cluster.arrive; barrier.cluster.wait;
@%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r21], 128;"""


def test_a_multicast_reads_global_memory_once() -> None:
    result = np.zeros(64, np.uint32)
    body = f"""{CLUSTER} setp.eq.and.u32 %p2, %r2, 0, %p1; mov.u16 %h1, 3;
    @%p2 {BULK}.multicast::cluster [%r20], [%rd1], 128, [%r21], %h1; {WAIT}
    mad.lo.u32 %r5, %r2, 32, %r1; mul.wide.u32 %rd3, %r5, 4; add.s64 %rd4, %rd2, %rd3; shl.b32 %r3, %r1, 2;
    add.u32 %r4, %r20, %r3; ld.shared.u32 %r6, [%r4]; st.global.u32 [%rd4], %r6;
    barrier.cluster.arrive; barrier.cluster.wait;"""
    found = run(body, words(), result, grid=2, cluster=2)
    assert (result == np.tile(np.arange(32), 2)).all() and found.races == ()
    assert (found.bytes.copy_read, found.bytes.tma_load) == (128, 256)


NULL = "setp.eq.u32 %p2, %r1, 7; setp.eq.and.u32 %p2, %r2, 2, %p2; selp.b64 %rd4, 0, %rd4, %p2;"
PAIR = {"grid": 2, "cluster": 2}
MMA = """mma.sync.aligned.m16n8{}.row.col.f32.f16.f16.f32
    {{%f2, %f3, %f4, %f5}}, {{{}}}, {{%r1, %r1}}, {{%f1, %f1, %f1, %f1}};"""


@pytest.mark.parametrize(
    ("said", "body", "more"),
    [
        ("CTA 2, thread 7: 16 bytes at 0x0", ROUND_TRIP.replace("{mul}", NULL), {"grid": 4}),
        ("copies 4, 8 or 16 bytes, got 12", f"{PLACES} cp.async.ca.shared.global [%r4], [%rd4], 12;", {}),
        ("at most its 16 bytes",
         f"{PLACES} mad.lo.u32 %r6, %r1, 4, 8; cp.async.cg.shared.global [%r4], [%rd4], 16, %r6;", {}),
        ("thread 7: address 0x",
         f"{PLACES} setp.eq.u32 %p2, %r1, 7; @%p2 add.s64 %rd4, %rd4, 4; mov.u32 %r6, 8;"
         "cp.async.cg.shared.global [%r4], [%rd4], 16, %r6;", {}),
        ("a multicast to 0x7, and the cluster has 2 CTAs",
         f"{CLUSTER} mov.u16 %h1, 7; @%p1 {BULK}.multicast::cluster [%r20], [%rd1], 128, [%r21], %h1; {WAIT}", PAIR),
        ("lie in different CTAs",
         f"{CLUSTER} mapa.shared::cluster.u32 %r22, %r20, 1; @%p1 {BULK} [%r22], [%rd1], 128, [%r21]; {WAIT}", PAIR),
        ("not a multiple of 64 bytes",
         f"{BARRIER} mov.u32 %r9, 0; @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r21], 1024;"
         f"@%p1 {BULK.replace('bulk.', 'bulk.tensor.2d.')} [%r20], [%rd1+16, {{%r9, %r9}}], [%r21];", {}),
        ("a reduction that there is not",
         "@%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r20], 64;", {}),
        ("mma: no m16n8k32 of f16", MMA.format("k32", "%r1, %r1, %r1, %r1"), {}),
        ("expected (4, 2, 4) registers of A, B, C, got (2, 2, 4)", MMA.format("k16", "%r1, %r1"), {}),
    ],
)  # fmt: skip
def test_what_no_gpu_does_is_refused(said: str, body: str, more: dict[str, Any]) -> None:
    refused(said, body, **more)


def test_each_warp_copies_its_own_map() -> None:
    made = words()
    body = """shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31; shl.b32 %r4, %r2, 7; add.u32 %r5, %r20, %r4;
    shl.b32 %r6, %r3, 2; add.u32 %r6, %r6, %r5; mov.u32 %r7, 0; st.shared.u32 [%r6], %r7; bar.warp.sync 0xffffffff;
    setp.eq.u32 %p2, %r3, 0; cvt.u64.u32 %rd5, %r5; add.u32 %r8, %r2, 5;
    @%p2 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%rd5], 0, %r8; bar.warp.sync 0xffffffff;
    cvt.u64.u32 %rd6, %r4; add.s64 %rd7, %rd1, %rd6;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd7], [%rd5], 128;"""
    assert run(body, made, words(), block=64).races == ()
    first, second, rest = np.split(made, [32, 64])
    assert first[4] == 5 and second[4] == 6 and (rest == words()[64:]).all()


@pytest.mark.parametrize(("version", "unit"), [("8.5", 16), ("8.6", 1)])
def test_a_maps_strides_are_in_units_of_16_bytes_before_ptx_8_6(version: str, unit: int) -> None:
    made = words()
    body = """shl.b32 %r3, %r1, 2; add.u32 %r4, %r20, %r3; mov.u32 %r7, 0; st.shared.u32 [%r4], %r7; bar.sync 0;
    cvt.u64.u32 %rd5, %r20; mov.u64 %rd6, 4096;
    @%p1 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%rd5], 0, %rd6; bar.sync 0;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%rd5], 128;"""
    run(body, made, words(), version=version)
    assert made[:32].tobytes() == replace(bytes(128), "global_stride", 0, 4096, stride_unit=unit)


# Matrix instructions

ROWS = "shl.b32 %r3, %r1, 4; add.u32 %r4, %r20, %r3; st.shared.v4.u32 [%r4], {%r1, %r1, %r1, %r1}; bar.sync 0;"
MATRICES = {
    "mma": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f2, %f3, %f4, %f5}, {%r1, %r1}, {%r1},"
    " {%f1, %f1, %f1, %f1};",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r4];",
    "ldmatrix of one": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r4];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r4], {%r1};",
}


@pytest.mark.parametrize("text", MATRICES.values(), ids=MATRICES)
def test_matrices_want_whole_warps(text: str) -> None:
    run(f"mov.f32 %f1, 0f00000000; {ROWS} {text}", words(), words(), block=64)
    for block in (16, 48):
        refused("wants whole warps of 32 threads", f"mov.f32 %f1, 0f00000000; {ROWS} {text}", block=block)
    # Two halves are not a warp.
    half = f"mov.f32 %f1, 0f00000000; {ROWS} and.b32 %r5, %r1, 16; setp.ne.u32 %p2, %r5, 0; @%p2 exit; {text}"
    refused("the 32 here are not", half, block=64)


def wgmma(
    kinds: str, registers: str, more: str = "", shared: int = 4096, before: str = "", **other: Any
) -> tuple[np.ndarray, LaunchResult]:
    """The first float that a wgmma of ones without a swizzle leaves in each thread, and the result."""
    fill = "mov.u32 %r7, 0x3f803f80; shl.b32 %r3, %r1, 4; add.u32 %r4, %r20, %r3; mov.b64 %rd10, 0x1000080000;"
    found = np.zeros(128, np.float32)
    guard = f"setp.lt.u32 %p2, %r1, {shared // 16}; @%p2"
    many = f"{fill} {guard} st.shared.v4.u32 [%r4], {{%r7, %r7, %r7, %r7}}; fence.proxy.async; bar.sync 0; {before}"
    one = f"wgmma.mma_async.sync.aligned.{kinds} {{{registers}}}, %rd10, %rd10, 0, 1, 1, 0, 0; {more}"
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mul.wide.u32 %rd3, %r1, 4;"
    result = run(
        f"{many} wgmma.fence.sync.aligned; {one} {end} add.s64 %rd5, %rd2, %rd3; st.global.f32 [%rd5], %f0;",
        words(),
        found,
        block=128,
        shared=shared,
        **other,
    )
    return found, result


FOUR = "%f0, %f1, %f2, %f3"


@pytest.mark.parametrize(
    ("kinds", "registers", "said"),
    [
        ("m64n8k16.f16.bf16.bf16", "%r10, %r11", "no product of bf16 and bf16 into f16"),
        ("m64n8k16.f32.f16.bf16", FOUR, "no product of f16 and bf16 into f32"),
        ("m64n16k16.f32.bf16.bf16", FOUR, "expected 8 registers of D for 16 columns of f32, got 4"),
        ("m64n12k16.f32.bf16.bf16", FOUR, "expected an N of 8 to 256 that bf16 has, got 12"),
        ("m64n40k32.s32.s8.u8", FOUR, "expected an N of 8 to 256 that s8 has, got 40"),
    ],
)
def test_a_wgmma_that_ptx_does_not_have_is_refused(kinds: str, registers: str, said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        wgmma(kinds, registers)


def test_a_wgmma_reads_no_more_than_the_memory_of_its_cta() -> None:
    assert (wgmma("m64n8k16.f32.bf16.bf16", FOUR, shared=2048)[0] == 16).all()
    for checks in (Checks(), Checks(False, False, False, False)):
        with pytest.raises(EmulationError, match="reads up to byte 2047 of 2032"):
            wgmma("m64n8k16.f32.bf16.bf16", FOUR, shared=2040, checks=checks)


@pytest.mark.parametrize("late", [False, True])
def test_accumulators_that_a_loop_takes_apart_are_right(late: bool) -> None:
    """Also before the wait, where ptxas waits for them; what it says of that is said."""
    wait = "wgmma.wait_group.sync.aligned 0;"
    body = f"""mov.u32 %r9, 0; LOOP: wgmma.commit_group.sync.aligned; {"" if late else wait}
        add.f32 %f8, %f8, %f0; {wait if late else ""} wgmma.fence.sync.aligned; add.u32 %r9, %r9, 1;
        setp.eq.u32 %p3, %r9, 3; @%p3 bra END;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{FOUR}}}, %rd10, %rd10, 1, 1, 1, 0, 0; bra LOOP;
        END: mov.f32 %f0, %f8;"""
    found, result = wgmma("m64n8k16.f32.bf16.bf16", FOUR, body, before="mov.f32 %f8, 0f00000000;")
    assert (found == 16 + 32 + 48).all()
    assert ("that may still be running" in str(result.races + result.notes)) == late == bool(result.notes)


@pytest.mark.parametrize("mask", [0b0011, 0b0101, 0b1000])
def test_a_product_in_flight_reaches_warps_that_parted_and_met(mask: int) -> None:
    parted = f"""wgmma.commit_group.sync.aligned; shr.u32 %r8, %r1, 5; mov.u32 %r9, {mask}; shr.u32 %r9, %r9, %r8;
        and.b32 %r9, %r9, 1; setp.eq.u32 %p3, %r9, 0; @%p3 bra OVER; add.u32 %r8, %r8, 7; OVER:"""
    found, result = wgmma("m64n8k16.f32.bf16.bf16", FOUR, parted)
    assert (found == 16).all() and result.races == ()
