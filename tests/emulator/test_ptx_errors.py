"""Every mistake ends in one sentence that names the argument, or the source line, the CTA and the thread."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ptx_lines import SHARED, TEXT, error
from ptx_lines import launch as lines

from rooflab.bench.emulate.ours import compile_ptx
from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.machine.run import Checks, EmulationError
from rooflab.bench.emulator.text.parse import parse
from rooflab.bench.emulator.text.syntax import PtxError

SOURCE = """
extern "C" __global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
extern "C" __global__ void asserts(const int* x) {
    assert(x[threadIdx.x] < 5);
}
"""


def ptx() -> str:
    """The PTX of CUDA C++."""
    return compile_ptx(SOURCE)


def error_of(
    name: str, args: list[Any], kind: type[Exception] = EmulationError, *, grid: int = 1, block: int = 32
) -> str:
    """The one line that one of its kernels ends with."""
    with pytest.raises(kind) as caught:
        emulate(PtxLaunch(ptx(), name, (block, 1, 1)), (grid,), args)
    text = str(caught.value)
    assert "\n" not in text and "\t" not in text
    return text


def floats(count: int = 256) -> torch.Tensor:
    """Ones."""
    return torch.ones(count)


def launch(text: str, name: str | None = "copy") -> None:
    """Launches the first kernel of the file from another text."""
    emulate(PtxLaunch(text, name, (32, 1, 1)), (1,), [floats(), floats(), 3])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (".target sm_90a", ".target sm_100a", "expected the target sm_90 or sm_90a, got sm_100a"),
        ("", "", "expected '}' for the '{'"),
        ("ld.global.f32", "ldx.f32", "expected an instruction that is known, got 'ldx.f32"),
        ("ld.global.f32", "ld.globule.f32", "expected an instruction that is known, got .globule in 'ld.globule"),
        ("mad.lo", "mad.mid", "expected an instruction that is known, got .mid in 'mad.mid"),
        ("%r1, %r3, %r4, %r5", "%r1, %r3, %r4, %r99", "a name that is declared, got '%r99'"),
        ("$L__BB0_2:", "$L__BB0_3:", "a label"),
        (".reg .pred", ".reg .bred", "a register of a known type"),
        (".reg .pred", ".ragged 3; .reg .pred", "a directive that is known, got '.ragged 3'"),
    ],
)
def test_what_the_parser_does_not_know_is_named(old: str, new: str, words: str) -> None:
    text = ptx()
    with pytest.raises(PtxError) as caught:
        launch(text.replace(old, new, 1) if old else text[: text.index("ld.global.f32")])
    assert words in str(caught.value)
    assert "instruction" not in words or " at kernel.cu:" in str(caught.value)


@pytest.mark.parametrize("text", ["", "no PTX", "__global__ void k() {}"])
def test_a_text_that_is_no_ptx_is_refused(text: str) -> None:
    with pytest.raises(PtxError, match=r"expected a text with \.version and \.target"):
        launch(text)


def test_a_kernel_that_is_missing_is_named_beside_those_there() -> None:
    assert "got 'nothing'" in error_of("nothing", [], PtxError)
    with pytest.raises(PtxError, match="expected a name, as the PTX has copy, asserts"):
        launch(ptx(), None)


def test_static_and_dynamic_shared_memory_are_taken_together() -> None:
    text = TEXT.format(outer="", declared=".shared .b8 s[48000];", block=32, body="")
    with pytest.raises(ValueError, match="got 248000, of which 48000 are the kernel's own"):
        emulate(PtxLaunch(text, "k", (32, 1, 1), 200000), (1,), [floats()])


def test_reads_and_writes_outside_a_tensor_name_thread_and_place() -> None:
    text = error_of("copy", [floats(100), floats(), 200], grid=2, block=128)
    assert "kernel.cu:4 " in text and "CTA 0, thread 100: " in text
    assert "begin 400 bytes into copy_param_0 of 400" in text
    text = error_of("copy", [floats(), floats(150), 200], grid=2, block=128)
    assert "(st.global.f32), CTA 1, thread 22: " in text and "copy_param_1 of 600" in text


OWN = "shl.b32 %r3, %r0, 2; mov.u32 %r2, s; add.u32 %r2, %r2, %r3;"
DECLARED = SHARED + " .local .align 4 .b8 l[32];"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ld.global.u32 %r1, [%d0+2];", "is not a multiple of 4 bytes"),
        (
            "mov.u64 %d3, 0; setp.eq.u32 %p1, %r0, 3; @%p1 st.global.u32 [%d3], %r0;",
            "thread 3: 4 bytes at 0x0: a null pointer",
        ),
        (OWN + "st.shared.u32 [%r2+904], %r0;", "thread 31: 4 bytes at shared"),
        (OWN + "ld.shared.u32 %r1, [%r2-4];", "shared address 0xfffffffc lie"),
        (OWN + "ld.shared.u32 %r1, [%r2+2];", "shared address 0x2 is not a multiple of 4"),
        (
            OWN + "setp.ne.u32 %p1, %r0, 5; @%p1 st.shared.u32 [%r2], %r0; bar.sync 0; ld.shared.u32 %r1, [%r2];",
            "shared memory at 0x14, which nobody has",
        ),
        (OWN + "mov.u32 %r2, l; add.u32 %r2, %r2, %r3; st.local.u32 [%r2], %r0;", "thread 31: 4 bytes at local"),
        ("setp.eq.u32 %p1, %r0, 9; @%p1 trap;", "the kernel trapped"),
    ],
)
def test_what_a_thread_must_not_do_is_an_error(body: str, words: str) -> None:
    text = error(body + "mov.u32 %r1, 0;", declared=DECLARED)
    assert words in text and "k: instruction " in text and "\n" not in text


def test_an_assertion_names_its_line_where_it_is_reached() -> None:
    text = error_of("asserts", [torch.arange(32, dtype=torch.int32)])
    assert "kernel.cu:7 " in text and "CTA 0, thread 5: the assertion 'x[threadIdx.x] < 5' failed (" in text
    assert "kernel.cu:7 in " in text and "asserts(const int *)" in text
    emulate(PtxLaunch(ptx(), "asserts", (32, 1, 1)), (1,), [torch.zeros(32, dtype=torch.int32)])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "setp.lt.u32 %p1, %r0, 32; @%p1 bra L; bar.sync 2, 64; bra E; L: bar.sync 1, 64; E: mov.u32 %r1, 0;",
            ["warp 0: waiting for barrier 1, where 32 of", "(bar.sync 1, 64)", "(bar.sync 2, 64)"],
        ),
        (
            "and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bar.sync 0; bar.sync 0; mov.u32 %r1, 0;",
            ["waiting for the rest of its warp"],
        ),
    ],
)
def test_a_deadlock_names_all_waits(body: str, words: list[str]) -> None:
    text = error(body, block=64)
    assert "nothing can go on (deadlock)" in text and all(word in text for word in words)


SPIN = "mov.u64 %d3, lock; cvta.global.u64 %d3, %d3; SPIN: {} setp.ne.u32 %p1, %r2, 0; @%p1 bra SPIN; mov.u32 %r1, 1;"
LOCK = ".global .align 4 .u32 lock[1] = {1};"


@pytest.mark.parametrize(
    ("asks", "words", "seed"),
    [
        ("atom.global.cas.b32 %r2, [%d3], 0, 1;", "what nobody writes; CTA", 3),
        ("atom.global.exch.b32 %r2, [%d3], 1;", "what nobody writes; CTA", 0),
        ("atom.global.add.u32 %r2, [%d3], 1;", "no CTA has ended for 0.2 s of the processor or more; CTA", 3),
        ("add.u32 %r2, %r2, 2; or.b32 %r2, %r2, 1;", "SECONDS=2 in the environment allows more", 0),
    ],
)
def test_a_lock_that_nobody_gives_back_ends(asks: str, words: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = 150 if "what" in words else 2
    monkeypatch.setenv("ROOFLAB_EMULATE_SECONDS", "0.2" if grid == 2 else "60")
    said = error(SPIN.format(asks), outer=LOCK, block=64, grid=grid, seed=seed)
    assert words in said and f"ing at instruction 9 ({asks.split(';', maxsplit=1)[0]}" in said
    monkeypatch.setenv("ROOFLAB_EMULATE_SECONDS", "-1")
    with pytest.raises(ValueError, match="ROOFLAB_EMULATE_SECONDS: expected a number of seconds, got '-1'"):
        lines("")


MEET = """mov.u64 %d3, lock; cvta.global.u64 %d3, %d3; @!%p0 bra END; atom.global.add.u32 %r2, [%d3], 1;
MEET: ld.volatile.global.u32 %r2, [%d3]; setp.le.u32 %p1, %r2, {}; @%p1 bra MEET; END:"""


@pytest.mark.parametrize(
    ("block", "shared", "registers", "held"), [(1024, 0, 32, 264), (32, 200 << 10, 32, 132), (256, 0, 128, 264)]
)
def test_ctas_that_meet_must_all_fit(
    block: int, shared: int, registers: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their threads, their shared memory and their registers."""
    monkeypatch.setattr("rooflab.bench.emulator.launch.registers_of", lambda ptx, name: registers)
    declared = f".shared .b8 s[{shared}];" if shared else ""
    unchecked = Checks(False, False, False, False)
    for grid in (held, held + 1):
        with pytest.raises(EmulationError) if grid > held else nullcontext() as caught:
            lines(MEET.format(grid), outer=LOCK, declared=declared, block=block, grid=grid, checks=unchecked)
    assert f"an H100 holds these {held} CTAs at once, and 1 of {held + 1} have not begun" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"launch": {"block": (1025, 1, 1)}}, "block: expected 1 to 1024 threads"),
        *[({"grid": grid}, "grid: expected one to three positive sizes") for grid in ((0,), (1, 1, 1, 1), (1, 65536))],
        ({"grid": (2**31 - 1,)}, "grid: expected at most 4194304 CTAs, of which each takes memory"),
        ({"grid": (2,), "ctas": [2]}, "ctas: expected numbers from 0 to 1, got 2"),
        ({"launch": {"dynamic_shared": 232449}}, "shared memory: expected 0 to 232448 bytes, got 232449"),
        ({"grid": 4}, "grid: expected a list of integers, got 4"),
        ({"ctas": 0}, "ctas: expected a list of integers, got 0"),
        ({"ctas": [0, 0]}, "ctas: expected each number once, got [0, 0]"),
        ({"checks": "all"}, "checks: expected Checks, got a value of type str"),
        ({"memory": ["x"]}, "memory: expected a list of tensors, got ['x']"),
        ({"written": {64: None}}, "written: expected tensors among the arguments or in `memory`, got another"),
        (
            {"args": [floats(), floats()]},
            "expected 3 for copy (u64 copy_param_0, u64 copy_param_1, u32 copy_param_2), got 2",
        ),
        ({"args": [floats(), floats(), 1.5]}, "copy_param_2: expected a number that fits .u32, got 1.5"),
        ({"args": [floats(), floats(), floats()]}, "copy_param_2: expected a number (.u32), got a tensor"),
        ({"args": [floats(), floats(), b"abc"]}, "copy_param_2: expected 4 bytes, got 3"),
        ({"args": [floats(), floats().to("meta"), 3]}, "copy_param_1: expected a tensor on the CPU, got one on meta"),
        ({"args": None}, "args: expected a list, got None"),
        ({"args": [torch.eye(4).to_sparse(), floats(), 3]}, "copy_param_0: expected a tensor in plain memory"),
        ({"launch": {"block": 32}}, "block: expected a list of integers, got 32"),
        ({"args": [floats(), floats(), 10**400]}, "copy_param_2: expected a number that fits .u32"),
        ({"launch": {"cluster": (32, 1, 1)}, "grid": (32,)}, "cluster: expected 1 to 16 CTAs"),
        ({"launch": {"cluster": (2, 1, 1)}, "grid": (3, 4)}, "cluster"),
        ({"launch": {"dynamic_shared": "4"}}, "dynamic_shared: expected a list of integers, got ['4']"),
        ({"launch": {"ptx": None}}, "ptx: expected a text, got a value of type NoneType"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_in_a_sentence(more: dict[str, Any], words: str) -> None:
    given = {"ptx": ptx(), "name": "copy", "block": (32, 1, 1), **more.get("launch", {})}
    call = {"grid": (1,), "args": [floats(), floats(), 3], **{key: more[key] for key in more if key != "launch"}}
    with pytest.raises(ValueError) as caught:
        emulate(PtxLaunch(**given), **call)
    assert words in str(caught.value)
    with pytest.raises(ValueError, match="compiled: expected a PtxLaunch"):
        emulate(given["ptx"], (1,), [])


OF_LLVM_23 = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x) .reqntid 32 {
    .reg .b32 %r<3>; .reg .b64 %rd<2>;
    .loc 1 10 14
    ld.param.b64 %rd1, [x];
    // begin inline asm
    .loc 1 10 14
    mov.u32 %r1, 0x0;
    .loc 1 11 14
    ld.global.b32 %r1, [%rd1];
    // end inline asm
    .loc 2 191 16, function_name $L__info_string0, inlined_at 1 12 23 // standard.py:191:16
    add.u32 %r2, %r1, %r1;
    .loc 2 170 12, function_name $L__info_string0, inlined_at 2 191 16 // standard.py:170:12
    add.u32 %r2, %r2, %r1;
    ret;
}
.file 1 "/here/mine.py"
.file 2 "/there/standard.py"
"""


def test_a_line_is_one_of_the_users_file() -> None:
    """LLVM 23 counts the lines of inline assembly, and names of nested calls only the next one."""
    places = [str(instruction.place) for instruction in parse(OF_LLVM_23).kernel("k").instructions]
    assert places[:3] == ["mine.py:10"] * 3
    assert places[3:5] == ["mine.py:12 (in standard.py:191)", "mine.py:12 (in standard.py:170)"]
