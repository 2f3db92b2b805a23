"""The wgmmas that lack a fence, and the writes of A's registers that come before the wait for the wgmma that reads
them, found in the text of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooflab.bench.emulator import Checks, PtxLaunch, emulate
from rooflab.bench.emulator.mended import FENCE, notes_of, release, touches
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
    "load_a": "ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%rd1];",
    "some_load_a": "@%p1 ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%rd1];",
    "some_write_a": "@%p1 add.u32 %r2, %r2, 1;",
    "keep": "st.global.v4.b32 [%rd1], {%r0,%r1,%r2,%r3};"
    f"st.global.v4.f32 [%rd1+32], {{{D}}}; st.global.v4.f32 [%rd1+48], {{{OTHER}}};",
    "begin": "ld.param.b64 %rd1, [p]; ld.global.v4.b32 {%r0,%r1,%r2,%r3}, [%rd1]; ld.global.b64 %rd2, [%rd1+16];"
    f"setp.eq.s64 %p1, %rd2, 1; setp.eq.s64 %p0, %rd2, 2; ld.global.v4.f32 {{{D}}}, [%rd1+32];"
    f"ld.global.v4.f32 {{{OTHER}}}, [%rd1+48];",
    "again:": "again:",
    "repeat": "@%p0 bra again;",
    "skip": "@%p1 bra there;",
    "there:": "there:",
}


HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"


def text_of(words: str) -> str:
    return HEAD + entry(words, "k")


def entry(words: str, name: str) -> str:
    return (
        f".visible .entry {name}(.param .u64 p)\n.reqntid 128\n{{\n"
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


WRITES_OF_A = {
    # On all paths: ptxas renames the register, or waits (a loop, its note C7513).
    "begin fence mul_a commit load_a wait keep": False,
    "begin fence mul_a commit write_a fence mul_other_a commit wait keep": False,
    "begin again: fence mul_a commit load_a wait1 repeat wait keep": False,
    # On some paths: the register stays the same one, and ptxas says nothing.
    "begin fence mul_a commit some_write_a wait keep": True,
    "begin fence mul_a commit some_load_a fence mul_other_a commit wait keep": True,
    "begin skip fence mul_a commit load_a there: fence mul_other_a commit wait keep": True,
    "begin again: fence mul_a commit some_load_a wait1 repeat wait keep": True,
}
"""By kernel with a write of A in front of the wait: whether the machine code has this fault too."""


def test_the_machine_code_shows_whether_ptxas_repairs_a_write_of_a() -> None:
    module = HEAD + "".join(entry(words, f"k{number}") for number, words in enumerate(WRITES_OF_A))
    mended = [words.replace(" wait1", "").replace("commit", "commit wait") for words in WRITES_OF_A]
    module += "".join(entry(words, f"m{number}") for number, words in enumerate(mended))
    assert all(found(rewritten, words) for words in WRITES_OF_A) and not any(
        found(rewritten, words) for words in mended
    )
    assert [touches(module, f"k{number}", "A") for number in range(len(WRITES_OF_A))] == list(WRITES_OF_A.values())
    assert not any(touches(module, f"m{number}", "A") for number in range(len(mended)))
    for name, severity, text in (("k0", "note", "repairs it: "), ("k3", "error", "does not repair it: ")):
        launch = PtxLaunch(module, name, (128, 1, 1), 1024)
        result = emulate(launch, (1,), [torch.zeros(16)], checks=Checks(uninitialised=False))
        (write,) = (each for each in result.findings if each.rule == "wgmma-registers")
        assert write.severity == severity and f"(ptxas {release()} {text}" in write.text


def test_a_fence_that_ptxas_puts_in_is_said_by_ptxas() -> None:
    for words in (
        "begin load_a mul_a commit wait keep",
        "begin fence mul_a commit wait write_a mul_other_a commit wait keep",
        "begin fence again: load_a mul_a commit wait repeat keep",
    ):
        assert found(unfenced, words) and FENCE & notes_of(text_of(words)), words
    text = text_of("write_d fence mul commit wait read_d")
    assert not FENCE & notes_of(text)
    without = text_of("write_d mul commit wait read_d")
    assert FENCE & notes_of(without)
    assert FENCE & notes_of(without.replace("8.7", "99.0")), "an NVRTC newer than ptxas"
    with pytest.raises(ValueError, match="ptx: ptxas refuses it:\nptxas .*wgmma"):
        notes_of(text.replace("wgmma.fence.sync.aligned;", "wgmma.fenced;"))
