"""The names of faults: what breaks each rule, the instructions that are named, and the place of a missing fence."""

import json
import re
from pathlib import Path

import pytest
import torch
from ptx_lines import SHARED, TEXT, launch

from rooflab.bench.emulator import Checks, EmulationError, Finding, PtxLaunch, emulate
from rooflab.bench.emulator.faults import RULES

ADDRESS = "mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r3, %r2, %r3; mov.u32 %r1, 0; "
STORE = "st.shared.u32 [%r3], %r0; bar.sync 0; "
READ = "ld.shared.u32 %r1, [s+128];"
COPY = "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r2], 128; cp.async.bulk.commit_group; "
BULK = "cp.async.bulk.global.shared::cta.bulk_group"
ENDS = "cp.async.bulk.wait_group 0; bar.sync 0;"
SUM = "red.global.add.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
MULTIPLY = WGMMA + " {%f0, %f1, %f2, %f3}, {%r4, %r5, %r6, %r7}, %d3, 1, 1, 1, 0; "
MATRICES = "mov.b64 %d3, 0x1000080000; " + "".join(
    f"mov.f32 %f{n}, 0f00000000; mov.b32 %r{n + 4}, 0; " for n in range(4)
)
COMMIT, WAIT = "wgmma.commit_group.sync.aligned; ", "wgmma.wait_group.sync.aligned 0;"
FENCE = "wgmma.fence.sync.aligned; "
LOOP = (
    "shr.u32 %r2, %r0, 5; add.u32 %r3, %r2, 1; L: bar.sync 0; sub.u32 %r3, %r3, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra L;"
)


def fault(body: str, **given: object) -> Finding:
    """The fault of a kernel of a few lines, whether it ends the kernel or not."""
    given = {"declared": SHARED, "checks": Checks(uninitialised=WGMMA not in body)} | given
    try:
        found = launch(body, **given)[1].findings
    except EmulationError as error:
        assert str(error) == f"[{error.fault.rule}] k: {error.fault.text}"
        return error.fault
    assert len({each.rule for each in found}) == 1, found
    return found[0]


FAULTS: list[tuple[str, str, str, str, int]] = [
    ("missing-fence", ADDRESS + STORE + COPY + ENDS, BULK, "st.shared.u32", 32),
    ("missing-fence", MATRICES + MULTIPLY + COMMIT + WAIT, WGMMA, "mov.f32", 128),
    ("race", ADDRESS + STORE.replace("0; ", "1, 32; ") + READ, "ld.shared.u32", "st.shared.u32", 64),
    ("out-of-bounds", "ld.global.u32 %r1, [%d0+4096];", "ld.global.u32", "", 32),
    ("misaligned", "ld.global.u32 %r1, [%d0+2];", "ld.global.u32", "", 32),
    ("unwritten-read", ADDRESS + "ld.shared.u32 %r1, [%r3];", "ld.shared.u32", "", 32),
    ("deadlock", "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 1, 64;", "bar.sync", "", 64),
    ("endless", "mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; bra L;", "add.u32", "", 32),
    ("barrier", LOOP, "bar.sync", "", 96),
    ("mbarrier-phase", ADDRESS + "mbarrier.arrive.shared.b64 %d3, [%r2];", "mbarrier.arrive.shared.b64", "", 32),
    ("wgmma-registers", MATRICES + FENCE + MULTIPLY + "add.u32 %r4, %r4, 1; " + COMMIT + WAIT, "add.u32", WGMMA, 128),
    ("early-exit", ADDRESS + STORE.replace(";", "; fence.proxy.async;", 1) + COPY, BULK, "", 32),
    ("nondeterministic-sum", f"mov.f32 %f0, 0f3DCCCCCD; {SUM} [%d0], %f0; bar.sync 0;", SUM, "", 64),
    ("invalid-use", "bar.sync 16;", "bar.sync", "", 32),
    ("trap", "trap;", "trap", "", 32),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "body", "instruction", "other", "block"), FAULTS)
def test_a_fault_has_the_name_of_its_rule(
    rule: str, body: str, instruction: str, other: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFLAB_EMULATE_SECONDS", "0.2")
    found = fault(body, block=block)
    assert (found.rule, found.instruction, found.other_instruction) == (rule, instruction, other), found.text
    repaired = WGMMA in body
    assert found.severity == ("note" if repaired or rule == "nondeterministic-sum" else "error")
    assert (found.kernel, found.grid, bool(found.missing)) == ("k", (1, 1, 1), rule == "missing-fence")
    assert json.loads(json.dumps(found.to_dict()))["section"] == RULES[found.rule][0]


def test_every_rule_has_a_kernel_that_breaks_it_and_a_row_on_the_page() -> None:
    elsewhere = {"output-not-written", "dependent-launch", "stream-order"}  # test_unwritten_outputs, test_launch_order
    assert {name for name, *_ in FAULTS} == RULES.keys() - elsewhere
    page = Path(__file__).parents[2].joinpath("docs/emulate.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == {name: f"{meaning} | {section or 'none'}" for name, (section, meaning) in RULES.items()}


def test_a_missing_fence_is_named_with_the_line_after_which_it_belongs() -> None:
    lines = [".loc 1 3 0", ADDRESS, ".loc 1 7 0", STORE, ".loc 1 9 0", COPY, ENDS]
    text = TEXT.format(outer='.file 1 "/mine/kernel.cu"', declared=SHARED, block=32, body="\n".join(lines))
    (found,) = emulate(PtxLaunch(text, "k", (32, 1, 1)), (1,), [torch.zeros(32, dtype=torch.int32)]).findings
    assert (found.file, found.line, found.other_file, found.other_line) == ("/mine/kernel.cu", 9, "/mine/kernel.cu", 7)
    assert (found.missing, found.belongs) == ("fence.proxy.async", "after kernel.cu:7 (st.shared.u32)")
    assert str(found).startswith("error [missing-fence]: k: write-read race on shared memory") and found.command == ""
