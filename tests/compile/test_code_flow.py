"""Tests that loops are found from branches alone, and that the loop which takes the time is named."""

from __future__ import annotations

import textwrap

import pytest

from rooflab.bench.compile.sass import parse
from rooflab.bench.compile.sass_flow import find_loops, hot_loop


def function(code: str):
    """A function of one instruction a line; `name:` before one is its label."""
    lines, address = [".text.k:"], 0
    for line in textwrap.dedent(code).strip().splitlines():
        text = line.strip()
        if text.endswith(":"):
            lines.append(text)
            continue
        guard, text = text.split(" ", 1) if text.startswith("@") else ("", text)
        lines.append(f"        /*{address:04x}*/    {guard} {text} ;")
        address += 16
    return parse("\n".join(lines))["k"]


def loops_of(code: str):
    return find_loops(function(code))


NESTED = """
    LDG.E R0, [R2]
    .L_outer:
    IADD3 R1, R1, 1
    .L_inner:
    LDG.E.128 R4, [R2]
    FFMA R8, R4, R5, R8
    @P0 BRA `(.L_inner)
    STG.E [R2], R8
    @P1 BRA `(.L_outer)
    EXIT
    .L_trap:
    BRA `(.L_trap)
"""


def test_nested_loops():
    outer, inner = loops_of(NESTED)
    assert (outer.start, outer.depth, outer.innermost, len(outer.instructions)) == (0x10, 1, False, 6)
    assert (inner.start, inner.depth, inner.innermost, len(inner.instructions)) == (0x20, 2, True, 3)
    assert inner.counts["global_load"] == 1 and inner.counts["fma"] == 1 and inner.counts["global_store"] == 0
    assert hot_loop([outer, inner]) is inner


STEP, NEXT = ".L_x:\nFADD R1, R1, R1\n", ".L_y:\nFMUL R1, R1, R1\n@P1 BRA `(.L_y)\nEXIT"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        pytest.param("EXIT\n.L_x:\nBRA `(.L_x)", [], id="the trap after the end"),
        pytest.param("MOV R1, R2\nFADD R1, R1, R1\n@!P0 BRA 0x10\nEXIT", [(0x10, 2)], id="a target as an address"),
        # The second loop is reached only if what ends the first may go on.
        *(
            pytest.param(f"{STEP}{branch}\n{NEXT}", [(0, 2), (0x20, 2)], id=branch)
            for branch in ("@P0 BRA `(.L_x)", "BRA P0, `(.L_x)", "BRA.U !UP0, `(.L_x)", "BRA.DIV UR4, `(.L_x)")
        ),
        pytest.param(f"{STEP}BRA `(.L_x)\n{NEXT}", [(0, 2)], id="an unconditional branch"),
        pytest.param(
            f"{STEP}@P0 BRA `(.L_x)\nFMUL R1, R1, R1\n@P1 BRA `(.L_x)\nEXIT", [(0, 4)], id="two edges to one head"
        ),
        pytest.param(
            "@P0 BRA `(.L_mid)\n.L_top:\nFADD R1, R1, R1\n.L_mid:\nFMUL R1, R1, R1\n@P1 BRA `(.L_top)\nEXIT",
            [],
            id="a jump into the middle",
        ),
        pytest.param(
            "CALL.REL.NOINC `(.L_f)\nEXIT\n.L_f:\nFADD R1, R1, R1\n@P0 BRA `(.L_f)\nRET.REL.NODEC R4 `(.L_f)",
            [(0x20, 2)],
            id="a called function",
        ),
    ],
)
def test_loops_by_their_head_and_length(code, wanted):
    assert [(loop.start, len(loop.instructions)) for loop in loops_of(code)] == wanted


def test_waiting_is_not_work():
    """A poll of a barrier out of line, as ptxas puts it, is in the loop that works and makes it no outer one."""
    loops = loops_of("""
        .L_work:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4]
        @!P0 BRA `(.L_wait)
        .L_ready:
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0
        @P1 BRA `(.L_work)
        EXIT
        .L_wait:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4]
        @!P0 BRA `(.L_wait)
        BRA `(.L_ready)
    """)
    work, wait = loops
    assert (work.start, work.innermost, work.waits) == (0, True, False)
    assert (wait.start, wait.innermost, wait.waits) == (0x50, False, True)
    assert hot_loop(loops) is work and work.counts["wgmma"] == 1


@pytest.mark.parametrize(("load", "waits"), [("LDG.E.STRONG.GPU R0, [R2]", True), ("LDG.E R0, [R2]", False)])
def test_a_loop_that_polls_a_flag_waits(load, waits):
    (loop,) = loops_of(f".L_x:\n{load}\n@P0 BRA `(.L_x)\nEXIT")
    assert loop.waits is waits


def test_the_hot_loop_is_the_tensor_cores_then_the_loads_then_the_largest():
    small = ".L_s:\nFADD R1, R1, R1\n@P0 BRA `(.L_s)\n"
    large = ".L_l:\n" + "FADD R1, R1, R1\n" * 9 + "@P0 BRA `(.L_l)\n"
    loads = ".L_g:\nLDG.E R4, [R2]\n@P0 BRA `(.L_g)\n"
    mma = ".L_t:\nHMMA.16816.F32 R4, R8, R12, R4\n@P0 BRA `(.L_t)\n"
    for code, wanted in ((small + large, ".L_l"), (small + large + loads, ".L_g"), (mma + large + loads, ".L_t")):
        code += "EXIT"
        assert hot_loop(loops_of(code)).start == function(code).labels[wanted]
    assert hot_loop(loops_of("EXIT")) is None


@pytest.mark.parametrize(
    "branch", ['BRX R4 -0x20 (*"BRANCH_TARGETS .L_a,.L_b"*)', "BRX R4 -0x20"], ids=["told", "not told"]
)
def test_an_indirect_branch_reaches_its_targets(branch):
    """Where the disassembler does not say where it goes, a label may be meant that nothing else refers to."""
    loops = loops_of(f"""
        LDC R4, c[0x2][R0]
        {branch}
        .L_a:
        MOV R5, RZ
        .L_first:
        LDG.E R4, [R2]
        @P0 BRA `(.L_first)
        EXIT
        .L_b:
        MOV R6, RZ
        .L_second:
        FADD R1, R1, R1
        @P0 BRA `(.L_second)
        EXIT
    """)
    assert [loop.start for loop in loops] == [0x30, 0x70]
