"""Blocks and forms of instructions that PTX does not allow: each is refused by name, beside the form that it allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_lines import SHARED, TEXT, error, launch

from rooflab.bench.ptx.arguments import Launch
from rooflab.bench.ptx.launch import emulate
from rooflab.bench.ptx.text.syntax import PtxError


def block_of(directives: str, block: tuple[int, int, int] | None) -> str:
    """What a kernel with these directives says to a block; nothing where it runs."""
    text = TEXT.format(declared="", block=0, body="mov.u32 %r1, 1;").replace(")\n{", f")\n{directives}\n{{", 1)
    try:
        emulate(Launch(text, "k", block), (1,), [torch.zeros(256, dtype=torch.int32)])
    except ValueError as error:
        return str(error)
    return ""


def test_a_kernel_that_requires_a_block_runs_with_no_other() -> None:
    assert block_of(".reqntid 64", None) == "" == block_of(".reqntid 64, 1", (64, 1, 1))
    for other in ((32, 1, 1), (128, 1, 1), (8, 8, 1)):
        assert f"block: expected (64, 1, 1), which the PTX of k says, got {other}" in block_of(".reqntid 64", other)


def test_a_kernel_that_names_the_most_threads_runs_with_fewer() -> None:
    assert block_of(".maxntid 8, 8, 1", (32, 1, 1)) == "" == block_of(".maxntid 64", (4, 8, 2))
    assert "block: expected 1 to 64 threads for k, got (96, 1, 1)" in block_of(".maxntid 64", (96, 1, 1))
    assert "which the PTX of k does not say" in block_of(".maxntid 64", None)


@pytest.mark.parametrize("block", [(64, 1, 1), (32, 2, 1)])
def test_both_directives_hold_together(block: tuple[int, int, int]) -> None:
    assert (block_of(".maxntid 128\n.reqntid 64", block) == "") == (block == (64, 1, 1))


def said(body: str, **more: Any) -> str:
    """The sentence that a text is refused with."""
    with pytest.raises(PtxError) as caught:
        launch(body + " mov.u32 %r1, 0;", declared=SHARED, **more)
    return str(caught.value)


D = "{%f0, %f1, %f2, %f3}"


@pytest.mark.parametrize(
    ("kinds", "k"), [("m64n8k32.f32.bf16.bf16", 16), ("m64n8k16.f32.tf32.tf32", 8), ("m64n8k16.f32.e4m3.e4m3", 32)]
)
def test_a_wgmma_reads_32_bytes_of_k(kinds: str, k: int) -> None:
    text = said(f"wgmma.mma_async.sync.aligned.{kinds} {D}, %d3, %d3, 0, 1, 1, 0, 0;", block=128)
    assert f"expected a K of {k} for {kinds.split('.')[2]}, got 'wgmma" in text


@pytest.mark.parametrize(("number", "registers"), [(4, "%r2, %r3"), (1, "%r2, %r3"), (2, "%r2, %r3, %r4, %r5")])
def test_a_matrix_has_a_register(number: int, registers: str) -> None:
    shape = f"sync.aligned.m8n8.x{number}.shared.b16"
    words = f"expected {number} registers for .x{number}, got '"
    assert words in said(f"mov.u32 %r10, s; ldmatrix.{shape} {{{registers}}}, [%r10];")
    assert words in said(f"mov.u32 %r10, s; stmatrix.{shape} [%r10], {{{registers}}};")


def test_a_commit_of_half_a_warpgroup_is_named() -> None:
    text = error("wgmma.commit_group.sync.aligned; mov.u32 %r1, 0;", block=64)
    assert "(wgmma.commit_group.sync.aligned)" in text and "whole warpgroups of 128 threads" in text


@pytest.mark.parametrize("size", [4, 8])
def test_a_copy_past_l1_has_16_bytes(size: int) -> None:
    text = said(f"mov.u32 %r2, s; cp.async.cg.shared.global [%r2], [%d0], {size};")
    assert "expected 16 bytes for cp.async.cg, got 'cp.async.cg.shared.global" in text


@pytest.mark.parametrize(("operand", "read"), [("%p1", 0), ("!%p1", 1), ("%p0", 1)])
def test_a_copy_may_ignore_its_source(operand: str, read: int) -> None:
    body = f"""setp.eq.u32 %p1, %r0, %r0; mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
        setp.ge.u32 %p0, %r0, 32; cp.async.ca.shared.global [%r4], [%d2], 4, {operand}; cp.async.wait_all;
        ld.shared.u32 %r1, [%r4];"""
    found, result = launch(body, declared=SHARED, to=torch.full((32,), 5, dtype=torch.int32))
    assert found == [5 * read] * 32 and result.bytes.copy_read == 128 * read


def test_lanes_choose_for_themselves_whether_a_source_is_ignored() -> None:
    body = """setp.lt.u32 %p1, %r0, 4; mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r4, %r2, %r3;
        cp.async.ca.shared.global [%r4], [%d2], 4, %p1; cp.async.wait_all; ld.shared.u32 %r1, [%r4];"""
    found, _ = launch(body, declared=SHARED, to=torch.full((32,), 5, dtype=torch.int32))
    assert found == [0] * 4 + [5] * 28


@pytest.mark.parametrize(
    ("instruction", "wanted"),
    [
        ("cvt.satfinite.e4m3x2.f32 %h0, %f0, %f0", "cvt.rn.satfinite into a pair of e4m3"),
        ("cvt.rn.e5m2x2.f32 %h0, %f0, %f0", "cvt.rn.satfinite into a pair of e5m2"),
        ("cvt.rz.satfinite.e5m2x2.f32 %h0, %f0, %f0", "cvt.rn.satfinite into a pair of e5m2"),
        ("cvt.satfinite.e4m3x2.f16x2 %h0, %r0", "cvt.rn.satfinite into a pair of e4m3"),
        ("cvt.f16x2.e4m3x2 %r2, %h0", "cvt.rn into a pair of f16"),
        ("cvt.bf16x2.f32 %r2, %f0, %f0", "cvt.rn or .rz into a pair of bf16"),
        ("cvt.rm.f16x2.f32 %r2, %f0, %f0", "cvt.rn or .rz into a pair of f16"),
    ],
)
def test_a_conversion_into_a_pair_says_how_it_rounds(instruction: str, wanted: str) -> None:
    text = said(f".reg .b16 %h<2>; mov.b16 %h0, 0; mov.f32 %f0, 0f00000000; {instruction};")
    assert f"expected {wanted}, got 'cvt." in text
