"""The wgmmas that lack a fence, and the writes of A's registers that come before the wait for the wgmma that reads
them, found in the text of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rooflab.bench.emulator.mended import FENCE, notes_of
from rooflab.bench.emulator.text.flow import Flow
from rooflab.bench.emulator.text.parse import parse
from rooflab.bench.emulator.text.wgmma_registers import rewritten, unfenced


def _multiply(d: str, a: str = "%rd1") -> str:
    last = ", 0, 0;" if a == "%rd1" else ", 0;"
    return f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{d}}}, {a}, %rd2, 1, 1, 1{last}"


D, OTHER = "%f0,%f1,%f2,%f3", "%f4,%f5,%f6,%f7"
TEXTS = {
    "fence": "wgmma.fence.sync.aligned;",
    "commit": "wgmma.commit_group.sync.aligned;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "wait1": "wgmma.wait_group.sync.aligned 1;",
    "mul": _multiply(D),
    "mul_other": _multiply(OTHER),
    "mul_a": _multiply(D, "{%r0,%r1,%r2,%r3}"),
    "mul_other_a": _multiply(OTHER, "{%r0,%r1,%r2,%r3}"),
    "mul_b": _multiply(D, "{%r4,%r5,%r6,%r7}"),
    "mul_other_b": _multiply(OTHER, "{%r4,%r5,%r6,%r7}"),
    "write_d": "mov.f32 %f1, 0f00000000;",
    "read_d": "add.f32 %f9, %f9, %f1;",
    "read_other": "add.f32 %f9, %f4, %f5;",
    "write_free": "mov.f32 %f9, 0f00000000;",
    "write_a": "add.u32 %r2, %r2, 1;",
    "write_b": "mov.b32 %r5, 0;",
    "read_a": "add.u32 %r8, %r2, 1;",
    "again:": "again:",
    "repeat": "@%p0 bra again;",
    "skip": "@%p1 bra there;",
    "there:": "there:",
}


def text_of(words: str) -> str:
    return (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k()\n.reqntid 128\n{\n"
        ".reg .f32 %f<16>; .reg .b64 %rd<4>; .reg .b32 %r<9>; .reg .pred %p<2>;\n"
        + "\n".join(TEXTS[word] for word in words.split())
        + "\nret;\n}\n"
    )


def found(check: Callable[[Flow], Any], words: str) -> list[tuple[int, int]]:
    """Numbers of the instructions of each pair, -1 where there is none."""
    pairs = check(Flow(parse(text_of(words)).kernel("k")))
    return sorted((first.number, -1 if second is None else second.number) for first, second in pairs)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("write_d fence mul mul mul_other", []),  # one fence serves a chain
        ("write_free mul", [(1, -1)]),  # the first wants one whatever its registers
        ("fence mul commit wait write_d fence mul", []),
        ("fence mul commit wait write_d mul", [(5, 4)]),
        ("fence mul_a commit wait write_a mul_other_a", [(5, 4)]),
        ("fence mul commit wait read_d mul", [(5, 4)]),
        ("fence mul fence mul_other commit wait read_d fence mul", []),
        ("fence mul fence mul_other commit wait read_d mul", [(7, 6)]),
        # A compiler moves it there: what it reads has been waited for, and ptxas keeps its order with the wgmma.
        ("fence mul commit wait fence read_d mul", []),
        ("fence mul commit wait read_other mul", []),
        ("fence again: mul commit wait read_d repeat", [(1, 4)]),
        ("again: write_d mul commit wait repeat", [(1, -1), (1, 0)]),
        ("fence write_d mul", []),  # LLVM ties operands to registers by moves, also behind a fence
        ("fence write_a mul_a", [(2, 1)]),
    ],
)
def test_a_use_of_a_wgmmas_registers_wants_a_fence_before_the_next(words: str, wanted: list[tuple[int, int]]) -> None:
    assert found(unfenced, words) == wanted


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("fence mul_a write_a", [(2, 1)]),
        ("fence mul_a commit write_a", [(3, 1)]),
        ("fence mul_a commit wait1 write_a", [(4, 1)]),
        ("fence mul_a wait commit write_a", [(4, 1)]),
        ("fence mul_a commit wait write_a", []),
        ("fence mul_a commit mul_b commit wait1 write_a", []),  # all but the newest are done
        ("fence mul_a commit mul_b commit wait1 write_b", [(6, 3)]),
        ("fence mul_a read_a commit", []),
        ("fence mul write_a", []),
        ("again: write_a fence mul_a commit wait repeat", []),
        ("again: write_a fence mul_a commit wait1 repeat", [(0, 2)]),
        # Of two ways the one with more groups pending counts.
        ("fence mul_a commit skip fence mul_other_b commit there: wait1 write_a", [(8, 1)]),
        ("fence mul_a commit fence mul_other_b commit there: wait1 write_a", []),
    ],
)
def test_a_write_of_a_wants_the_wait_of_its_products_own_group(words: str, wanted: list[tuple[int, int]]) -> None:
    assert found(rewritten, words) == wanted


def test_a_fence_that_ptxas_puts_in_is_said_by_ptxas() -> None:
    text = text_of("write_d fence mul commit wait read_d")
    assert FENCE not in notes_of(text)
    without = text_of("write_d mul commit wait read_d")
    assert FENCE in notes_of(without)
    assert FENCE in notes_of(without.replace("8.7", "99.0")), "an NVRTC newer than ptxas"
    with pytest.raises(ValueError, match="ptx: ptxas refuses it:\nptxas .*wgmma"):
        notes_of(text.replace("wgmma.fence.sync.aligned;", "wgmma.fenced;"))
