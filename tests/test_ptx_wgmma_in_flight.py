"""Which writes of A's registers come before the wgmma that reads them has been waited for."""

from __future__ import annotations

import pytest
from test_ptx_wgmma_fences import FENCE, multiply

from rooflab.bench.ptx.text import wgmma_registers
from rooflab.bench.ptx.text.flow import Flow
from rooflab.bench.ptx.text.parse import parse

A, OTHER = "{%r0,%r1,%r2,%r3}", "{%r4,%r5,%r6,%r7}"
COMMIT = "wgmma.commit_group.sync.aligned;"
WRITE = "add.u32 %r2, %r2, 1;"


def wait(pending: int) -> str:
    return f"wgmma.wait_group.sync.aligned {pending};"


def rewritten(*body: str) -> list[tuple[int, int]]:
    text = (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k()\n.reqntid 128\n{\n"
        ".reg .f32 %f<16>; .reg .b64 %rd<4>; .reg .b32 %r<9>; .reg .pred %p<2>;\n" + "\n".join(body) + "\nret;\n}\n"
    )
    module = parse(text)
    found = wgmma_registers.rewritten(Flow(module.kernel("k")))
    return sorted((writer.number, wgmma.number) for writer, wgmma in found)


@pytest.mark.parametrize(("between", "late"), [([], True), ([COMMIT], True), ([COMMIT, wait(1)], True),
                                               ([wait(0), COMMIT], True), ([COMMIT, wait(0)], False)])  # fmt: skip
def test_a_write_needs_the_wait_of_the_products_own_group(between: list[str], late: bool) -> None:
    found = rewritten(FENCE, multiply(a=A), *between, WRITE)
    assert found == ([(2 + len(between), 1)] if late else [])


def test_a_wait_for_all_but_the_newest_leaves_the_older_ones_done() -> None:
    body = [FENCE, multiply(a=A), COMMIT, multiply(a=OTHER), COMMIT, wait(1)]
    assert rewritten(*body, WRITE) == []
    assert rewritten(*body, "mov.b32 %r5, 0;") == [(6, 3)]


def test_reading_a_is_no_fault_and_neither_is_a_in_shared_memory() -> None:
    assert rewritten(FENCE, multiply(a=A), "add.u32 %r8, %r2, 1;", COMMIT) == []
    assert rewritten(FENCE, multiply(), WRITE) == []


@pytest.mark.parametrize("pending", [0, 1])
def test_the_next_turn_of_a_loop_writes_a_too(pending: int) -> None:
    body = ["again:", WRITE, FENCE, multiply(a=A), COMMIT, wait(pending), "@%p1 bra again;"]
    assert rewritten(*body) == ([(0, 2)] if pending else [])


def test_of_two_ways_the_one_with_more_groups_pending_counts() -> None:
    tail = ["there:", wait(1), WRITE]
    skipped = ["@%p1 bra there;", FENCE, multiply("{%f4,%f5,%f6,%f7}", OTHER), COMMIT]
    assert rewritten(FENCE, multiply(a=A), COMMIT, *skipped, *tail) == [(8, 1)]
    assert rewritten(FENCE, multiply(a=A), COMMIT, *skipped[1:], *tail) == []
