"""Blocks and forms of instructions that PTX does not allow: each is refused by name, beside the form that it allows."""

from __future__ import annotations

import pytest
import torch
from ptx_lines import SHARED, TEXT, error, launch

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.text.syntax import PtxError


def block_of(directives: str, block: tuple[int, int, int] | None) -> str:
    """What a kernel with these directives says to a block; nothing where it runs."""
    text = TEXT.format(outer="", declared="", block=0, body="mov.u32 %r1, 1;")
    text = text.replace(")\n{", f")\n{directives}\n{{", 1)
    try:
        emulate(PtxLaunch(text, "k", block), (1,), [torch.zeros(256, dtype=torch.int32)])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("directives", "block", "words"),
    [
        (".reqntid 64", None, ""),
        *[
            (".reqntid 64", other, f"block: expected (64, 1, 1), which the PTX of k says, got {other}")
            for other in ((32, 1, 1), (128, 1, 1), (8, 8, 1))
        ],
        (".maxntid 8, 8, 1", (32, 1, 1), ""),
        (".maxntid 64", (96, 1, 1), "block: expected 1 to 64 threads for k, got (96, 1, 1)"),
        (".maxntid 64", None, "which the PTX of k does not say"),
        (".maxntid 128\n.reqntid 64", (64, 1, 1), ""),
        (".maxntid 128\n.reqntid 64", (32, 2, 1), "block: expected (64, 1, 1)"),
    ],
)
def test_a_kernel_runs_with_the_blocks_that_it_names(
    directives: str, block: tuple[int, int, int] | None, words: str
) -> None:
    said = block_of(directives, block)
    assert words in said and bool(words) == bool(said)


D = "{%f0, %f1, %f2, %f3}"
MATRIX = "sync.aligned.m8n8.x{}.shared.b16"
GUARDED = [
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1}",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r3]",
    "cp.async.commit_group",
    "cp.async.wait_group 0",
    "bar.red.popc.u32 %r2, 0, %p1",
    "barrier.cluster.arrive",
    "setmaxnreg.inc.sync.aligned.u32 24",
    "fence.acq_rel.gpu",
    "wgmma.commit_group.sync.aligned",
]
REFUSED = [
    # A wgmma reads 32 bytes of k, and a matrix has a register.
    *[(f"wgmma.mma_async.sync.aligned.{kinds} {D}, %d3, %d3, 0, 1, 1, 0, 0",
       f"expected a K of {k} for {kinds.split('.')[2]}, got 'wgmma")
      for kinds, k in (("m64n8k32.f32.bf16.bf16", 16), ("m64n8k16.f32.tf32.tf32", 8), ("m64n8k16.f32.e4m3.e4m3", 32))],
    *[(text, f"expected {number} registers for .x{number}, got '")
      for number, registers in ((4, "%r2, %r3"), (1, "%r2, %r3"), (2, "%r2, %r3, %r4, %r5"))
      for text in (f"ldmatrix.{MATRIX.format(number)} {{{registers}}}, [%r10]",
                   f"stmatrix.{MATRIX.format(number)} [%r10], {{{registers}}}")],
    *[(f"cp.async.cg.shared.global [%r2], [%d0], {size}",
       "expected 16 bytes for cp.async.cg, got 'cp.async.cg.shared.global") for size in (4, 8)],
    # A conversion into a pair says how it rounds.
    ("cvt.satfinite.e4m3x2.f32 %h0, %f0, %f0", "expected cvt.rn.satfinite into a pair of e4m3, got 'cvt."),
    ("cvt.rn.e5m2x2.f32 %h0, %f0, %f0", "expected cvt.rn.satfinite into a pair of e5m2, got 'cvt."),
    ("cvt.satfinite.e4m3x2.f16x2 %h0, %r0", "expected cvt.rn.satfinite into a pair of e4m3, got 'cvt."),
    ("cvt.f16x2.e4m3x2 %r2, %h0", "expected cvt.rn into a pair of f16, got 'cvt."),
    ("cvt.bf16x2.f32 %r2, %f0, %f0", "expected cvt.rn or .rz into a pair of bf16, got 'cvt."),
    ("cvt.rm.f16x2.f32 %r2, %f0, %f0", "expected cvt.rn or .rz into a pair of f16, got 'cvt."),
    # A predicate that would not be heeded, and operands that do not fit.
    *[(f"@%p1 {instruction}", "without a predicate, got '@%p1 ") for instruction in GUARDED],
    *[(instruction, f"expected the operands and modifiers of .{instruction.split('.')[0]}, got '")
      for instruction in ("add.u32 %r2, %r1", "shfl.b32 %r2, %r1, 1, 2", "vote.any.pred %p1, %p1", "mov.u32 %r2")],
    *[(f"mbarrier.{instruction}, [s], %d5", "expected an mbarrier that orders memory, got 'mbarrier")
      for instruction in ("arrive.relaxed.cluster.shared::cta.b64 _", "test_wait.relaxed.cta.b64 %p1")],
    ("sub.u16x2 %r2, %r1, %r1", "the operands and modifiers of .sub, got 'sub.u16x2"),
    ("lg2.approx.f16 %h2, %h1", "known, got 'lg2.approx.f16"),
    ("isspacep.const %p1, %d0", "a space that addresses tell apart"),
    ("mov.u32 %r2, 08", "got '08'"),
    ("mov.b16 %h2, 1.0", "expected an integer"),
    ("lop3.or.b32 %r2|%p1, %r1, %r1, %r1, 0x80, %p1", "a register for a result, got a group in 'lop3.or"),
    ("and.b32 %r2, %r1, %p1", "%p1 to be used as what it is, a .pred in 'and"),
    (".reg .v2 .b32 %v; ld.global.v2.b32 %v, [%d0]", "expected a register of a known type, got '.reg .v2"),
    ("{ .param .b32 q; st.param.b32 [q], %r1; call.uni f, (q, q); }",
     "expected 1 parameters and results of f, got 'call"),
    ("call.uni g", "neither recursive nor guarded"),
    ("q: .callprototype _ (.param .b32 a); call.uni %d3, (%r1), q", "got one by a pointer"),
    ("cvt.rn.s32.f32 %r2, %f1", "expected cvt.rni, .rzi, .rmi or .rpi from f32 to s32, got 'cvt.rn.s32.f32"),
    (".loc 1 7 0\nldx.u32 %r2, %r1", "b.cu:7"),  # two slashes in a path are no comment
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "words"), REFUSED)
def test_what_ptx_does_not_allow_or_is_not_known_is_refused_in_one_sentence(instruction: str, words: str) -> None:
    outer = '.file 1 "/a//b.cu"\n.func f(.param .b32 a) { ret; }\n.func g() { call.uni g; ret; }'
    with pytest.raises(PtxError) as caught:
        launch(f"{instruction}; mov.u32 %r1, 0;", declared=SHARED, outer=outer, block=128)
    assert words in str(caught.value) and "\n" not in str(caught.value) and "None" not in str(caught.value)


def test_a_commit_of_half_a_warpgroup_is_named() -> None:
    text = error("wgmma.commit_group.sync.aligned; mov.u32 %r1, 0;", block=64)
    assert "(wgmma.commit_group.sync.aligned)" in text and "whole warpgroups of 128 threads" in text


@pytest.mark.parametrize(
    ("operand", "taken"), [("%p1", range(0)), ("!%p1", range(32)), ("%p2", range(32)), ("%p3", range(4, 32))]
)
def test_a_copy_may_ignore_its_source_lane_by_lane(operand: str, taken: range) -> None:
    body = f"""setp.eq.u32 %p1, %r0, %r0; mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
        setp.ge.u32 %p2, %r0, 32; setp.lt.u32 %p3, %r0, 4;
        cp.async.ca.shared.global [%r4], [%d2], 4, {operand}; cp.async.wait_all; ld.shared.u32 %r1, [%r4];"""
    found, result = launch(body, declared=SHARED, to=torch.full((32,), 5, dtype=torch.int32))
    assert found == [5 * (lane in taken) for lane in range(32)] and result.bytes.copy_read == 4 * len(taken)
