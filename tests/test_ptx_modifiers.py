"""Modifiers and forms of operands that compilers write seldom: each means what PTX says, or is refused by name."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from rooflab.bench.ptx.arguments import Launch
from rooflab.bench.ptx.launch import emulate
from rooflab.bench.ptx.text.syntax import PtxError

TEXT = """.version 8.7
.target sm_90a
.address_size 64
{outer}
.visible .entry k(.param .u64 x, .param .u64 y)
{{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .f32 %f<8>; .reg .f64 %e<8>;
ld.param.u64 %d0, [x];
ld.param.u64 %d1, [y];
mov.u32 %r0, %tid.x;
mad.wide.u32 %d2, %r0, 4, %d0;
mad.wide.u32 %d3, %r0, 4, %d1;
ld.global.b32 %r1, [%d2];
mov.b32 %f1, %r1;
cvt.u16.u32 %h1, %r1;
{body}
st.global.b32 [%d3], %r2;
ret;
}}
"""
"""Lane i has the i-th of the given words in %r1, %f1 and %h1, and leaves %r2."""


def results(body: str, given: Any = 0, outer: str = "") -> list[int]:
    """What 32 lanes leave in %r2."""
    x = torch.from_numpy(np.broadcast_to(np.asarray(given, np.uint32), 32).copy())
    y = torch.zeros(32, dtype=torch.int32)
    emulate(Launch(TEXT.format(body=body, outer=outer), "k", (32, 1, 1)), (1,), [x, y])
    return list(y.numpy().view(np.uint32))


def result(body: str, given: int = 0, outer: str = "") -> int:
    """What all lanes leave in %r2."""
    (found,) = set(results(body, given, outer))
    return int(found)


def bits(value: float) -> int:
    """Those of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


SAID = "selp.u32 %r2, 1, 0, %p1;"


@pytest.mark.parametrize("given", [5, 0x80000005])
@pytest.mark.parametrize("ftz", [True, False])
def test_comparisons_flush_denormals_where_they_say_so(given: int, ftz: bool) -> None:
    dot = ".ftz" if ftz else ""
    assert result(f"setp.eq{dot}.f32 %p1, %f1, 0f00000000; {SAID}", given) == ftz
    assert result(f"mov.b16 %h2, 0; setp.eq{dot}.f16 %p1, %h1, %h2; {SAID}", given) == ftz
    assert result(f"set.ne{dot}.u32.f32 %r2, %f1, 0f00000000;", given) == (0 if ftz else 0xFFFFFFFF)
    assert result(f"slct{dot}.u32.f32 %r2, 1, 2, %f1;", given) == (1 if ftz or given == 5 else 2)


@pytest.mark.parametrize(("dot", "wanted"), [(".ftz", 1), ("", 0)])
def test_both_halves_of_a_packed_comparison_are_flushed(dot: str, wanted: int) -> None:
    zero = "mov.b32 %r3, 0;"
    both = "selp.u32 %r2, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; or.b32 %r2, %r2, %r4;"
    assert result(f"{zero} setp.eq{dot}.f16x2 %p1|%p2, %r1, %r3; {both}", 0x40008001) == wanted


@pytest.mark.parametrize(
    ("instruction", "given", "wanted"),
    [
        ("add.u16x2 %r2, %r1, %r1", 0x00018001, 0x00020002),
        ("add.s16x2 %r2, %r1, %r1", 0x8000FFFF, 0x0000FFFE),
        ("min.s16x2 %r2, %r1, %r3", 0xFFFB0007, 0xFFFB0002),
        ("max.u16x2 %r2, %r1, %r3", 0xFFFB0001, 0xFFFB0002),
        ("max.relu.s16x2 %r2, %r1, %r1", 0xFFFB0003, 0x00000003),
        ("min.relu.s32 %r2, %r1, %r3", 0xFFFFFFFB, 0),
        ("max.relu.s32 %r2, %r1, %r1", 0xFFFFFFFB, 0),
        ("min.relu.s32 %r2, %r1, 7", 5, 5),
    ],
)
def test_packed_integers_keep_to_their_halves_and_relu_clamps(instruction: str, given: int, wanted: int) -> None:
    assert result(f"mov.u32 %r3, 0x00020002; {instruction};", given) == wanted


def test_packed_integers_that_ptx_lacks_are_refused() -> None:
    with pytest.raises(PtxError, match=r"an instruction that is known, got 'sub\.u16x2"):
        result("sub.u16x2 %r2, %r1, %r1;")


def test_mad24_saturates_where_it_says_so() -> None:
    assert result("mad24.hi.sat.s32 %r2, %r1, %r1, 0x7fffffff;", 0x7FFFFF) == 0x7FFFFFFF
    assert result("mad24.hi.s32 %r2, %r1, %r1, 0x7fffffff;", 0x7FFFFF) == (0x7FFFFFFF + (0x7FFFFF**2 >> 16)) % 2**32


def test_the_upper_half_of_a_product_with_carry_is_signed_where_its_type_is() -> None:
    assert result("mad.hi.cc.s32 %r2, %r1, %r1, 0;", 0xFFFFFFFF) == 0
    assert result("mad.hi.cc.u32 %r2, %r1, %r1, 0;", 0xFFFFFFFF) == 0xFFFFFFFE
    assert result("add.cc.u32 %r3, %r1, %r1; madc.hi.s32 %r2, %r1, %r1, 0;", 0xFFFFFFFF) == 1


def test_a_lane_without_the_predicate_keeps_its_carry() -> None:
    body = (
        "setp.lt.u32 %p1, %r1, 2; mov.u32 %r4, -1; add.cc.u32 %r3, %r4, %r4; @%p1 add.cc.u32 %r3, %r1, 0;"
        " addc.u32 %r2, 0, 0;"
    )
    assert results(body, range(32)) == [0, 0, *[1] * 30]


@pytest.mark.parametrize(
    ("kind", "wanted"), [("u8", 0x05FFFF), ("s8", 0x057F7F), ("u4", 0x5FF), ("s4", 0x577), ("u2", 0x5F), ("s2", 0x55)]
)
def test_cvt_pack_has_every_width(kind: str, wanted: int) -> None:
    assert result(f"cvt.pack.sat.{kind}.s32.b32 %r2, %r1, %r1, 5;", 1000) == wanted


def test_results_are_made_from_the_operands_as_they_were() -> None:
    body = "setp.eq.u32 %p1, %r1, %r1; setp.lt.and.u32 %p1|%p2, %r1, %r1, %p1; selp.u32 %r2, 1, 0, %p2;"
    assert result(body) == 1
    body = (
        "setp.lt.u32 %p1, %r1, 4; setp.ne.u32 %p2, %r1, %r1; @%p1 setp.ge.u32 %p1|%p2, %r1, 2; selp.u32 %r2, 1, 0, %p2;"
    )
    assert results(body, range(32)) == [1, 1, *[0] * 30]


@pytest.mark.parametrize("written", ["1.5", "15e-1", "0f3FC00000", "0d3FF8000000000000"])
def test_constants_of_floats_have_the_width_that_is_wanted(written: str) -> None:
    assert result(f"st.global.f32 [%d2], {written}; ld.global.b32 %r2, [%d2];") == bits(1.5)
    assert result(f"mov.f32 %f2, {written}; mov.b32 %r2, %f2;") == bits(1.5)
    assert result(f"mov.f64 %e1, {written}; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r2, %f2;") == bits(1.5)
    outer = f".global .align 8 .f64 g[2] = {{0d0000000000000000, {written}}};"
    assert result("ld.global.f64 %e1, [g+8]; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r2, %f2;", outer=outer) == bits(1.5)
    assert result("ld.global.b32 %r2, [g];", outer=f".global .align 4 .f32 g = {written};") == bits(1.5)


@pytest.mark.parametrize("made", ["ld.global.f32 %d5, [%d2];", "cvt.rn.f32.u32 %d5, 1;"])
def test_a_float_in_a_wider_register_is_its_bits(made: str) -> None:
    assert result(f"{made} shr.u64 %d6, %d5, 32; cvt.u32.u64 %r2, %d6;", bits(1)) == 0
    assert result(f"{made} cvt.u32.u64 %r2, %d5;", bits(1)) == bits(1)


def test_rows_of_an_initialiser_are_filled_with_zeros() -> None:
    outer = ".global .align 4 .b32 g[2][2] = {{1}, {3}};"
    assert [result(f"ld.global.b32 %r2, [g+{at}];", outer=outer) for at in (0, 4, 8, 12)] == [1, 0, 3, 0]


def test_vectors_in_memory_have_all_their_bytes() -> None:
    outer = ".shared .v4 .f32 a[4]; .shared .f32 b; .global .v2 .b32 g[2] = {{1, 2}, {3, 4}};"
    assert result("mov.u32 %r3, a; mov.u32 %r4, b; sub.u32 %r2, %r4, %r3;", outer=outer) == 64
    assert result("ld.global.b32 %r2, [g+8];", outer=outer) == 3
    with pytest.raises(PtxError, match=r"expected a register of a known type, got '\.reg \.v2"):
        result(".reg .v2 .b32 %v; ld.global.v2.b32 %v, [%d0]; mov.u32 %r2, 0;")


def test_an_address_may_be_so_many_bytes_beyond_a_variable() -> None:
    outer = ".shared .align 16 .b8 s[64];"
    assert result("mov.u32 %r2, s+12; mov.u32 %r3, s; sub.u32 %r2, %r2, %r3;", outer=outer) == 12


@pytest.mark.parametrize("guard", ["@%p1", "@ %p1", "@!%p2", "@! %p2"])
def test_a_predicate_may_stand_apart_from_its_sign(guard: str) -> None:
    body = f"setp.lt.u32 %p1, %r1, 2; not.pred %p2, %p1; mov.u32 %r2, 3; {guard} mov.u32 %r2, 7;"
    assert results(body, range(32)) == [7, 7, *[3] * 30]


def test_a_jump_by_a_table_leaves_lanes_without_the_predicate() -> None:
    body = (
        "setp.lt.u32 %p1, %r1, 2; table: .branchtargets one, two; @%p1 brx.idx %r1, table; mov.u32 %r2, 9; bra end;"
        " one: mov.u32 %r2, 1; bra end; two: mov.u32 %r2, 2; end: add.u32 %r2, %r2, 0;"
    )
    assert results(body, range(32)) == [1, 2, *[9] * 30]


@pytest.mark.parametrize("opcode", ["bar.red.popc", "barrier.red.popc.aligned", "barrier.cta.red.popc.aligned"])
def test_a_reduction_over_a_cta_by_each_of_its_names(opcode: str) -> None:
    assert result(f"setp.eq.u32 %p1, %r1, 0; {opcode}.u32 %r2, 0, %p1;") == 32


def test_what_nobody_wrote_is_poison_and_no_error() -> None:
    assert result("setp.ne.u32 %p1, 1, 1; @%p1 mov.u32 %r5, 7; add.u32 %r6, %r5, 1; mov.u32 %r2, 4;") == 4
    poison = results("setp.lt.u32 %p1, %r1, 2; @%p1 mov.u32 %r5, 7; mov.u32 %r2, %r5;", range(32))
    assert poison == [7, 7, *[0xFFFFFFFF] * 30]


def test_a_breakpoint_that_no_lane_reaches_does_nothing() -> None:
    assert result("mov.u32 %r2, 5; setp.ne.u32 %p1, %r1, 0; @%p1 brkpt; add.u32 %r2, %r2, 1;") == 6


@pytest.mark.parametrize(
    "instruction",
    [
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1}",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r3]",
        "cp.async.commit_group",
        "cp.async.wait_group 0",
        "bar.red.popc.u32 %r2, 0, %p1",
        "barrier.cluster.arrive",
        "setmaxnreg.inc.sync.aligned.u32 24",
        "fence.acq_rel.gpu",
        "wgmma.commit_group.sync.aligned",
    ],
)
def test_a_predicate_that_would_not_be_heeded_is_refused(instruction: str) -> None:
    with pytest.raises(PtxError, match="without a predicate, got '@%p1 "):
        result(f"mov.u32 %r3, 0; mov.u32 %r2, 0; setp.ne.u32 %p1, %r1, %r1; @%p1 {instruction};")


@pytest.mark.parametrize(
    "instruction", ["add.u32 %r2, %r1", "shfl.b32 %r2, %r1, 1, 2", "vote.any.pred %p1, %p1", "mov.u32 %r2"]
)
def test_operands_that_do_not_fit_are_named_with_their_instruction(instruction: str) -> None:
    with pytest.raises(PtxError, match=f"expected the operands and modifiers of .{instruction.split('.')[0]}, got '"):
        result(f"{instruction};")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("lg2.approx.f16 %h2, %h1;", r"known, got 'lg2\.approx\.f16"),
        ("isspacep.const %p1, %d0;", "a space that addresses tell apart"),
        ("mov.u32 %r2, 08;", "got '08'"),
        ("mov.b16 %h2, 1.0;", r"expected an integer.* in 'mov\.b16"),
        ("lop3.or.b32 %r2|%p1, %r1, %r1, %r1, 0x80, %p1;", r"a register for a result, got a group in 'lop3\.or"),
        ("and.b32 %r2, %r1, %p1;", r"%p1 to be used as what it is, a \.pred in 'and"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence(body: str, words: str) -> None:
    with pytest.raises(PtxError, match=words):
        result(body + " mov.u32 %r2, 0;")


@pytest.mark.parametrize("instruction", ["arrive.relaxed.cluster.shared::cta.b64 _", "test_wait.relaxed.cta.b64 %p1"])
def test_an_mbarrier_that_orders_nothing_is_refused(instruction: str) -> None:
    with pytest.raises(PtxError, match="expected an mbarrier that orders memory, got 'mbarrier"):
        result(f"mbarrier.{instruction}, [m], %d5; mov.u32 %r2, 0;", outer=".shared .align 8 .b64 m;")


def test_a_call_with_too_many_arguments_is_named() -> None:
    body = "{ .param .b32 q; st.param.b32 [q], %r1; call.uni f, (q, q); } mov.u32 %r2, 0;"
    with pytest.raises(PtxError, match="expected 1 parameters and results of f, got 'call"):
        result(body, outer=".func f(.param .b32 a) { ret; }")


def test_a_source_file_may_have_two_slashes_in_its_path() -> None:
    with pytest.raises(PtxError, match=r"b\.cu:7"):
        result(".loc 1 7 0\nldx.u32 %r2, %r1;", outer='.file 1 "/a//b.cu"')
