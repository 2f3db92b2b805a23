"""Which wgmmas lack a fence, as the text of a kernel shows it."""

import pytest

from rooflab.bench.ptx.text import wgmma_registers
from rooflab.bench.ptx.text.flow import Flow
from rooflab.bench.ptx.text.parse import parse

FENCE = "wgmma.fence.sync.aligned;"
WAIT = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
D, OTHER = ("{%f0,%f1,%f2,%f3}", "{%f4,%f5,%f6,%f7}")


def multiply(d=D, a="%rd1"):
    return (
        f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {d}, {a}, %rd2, 1, 1, 1{', 0' if a == '%rd1' else ''}, 0;"
    )


def unfenced(*body):
    text = (
        ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k()\n.reqntid 128\n{\n"
        ".reg .f32 %f<16>; .reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p<2>;\n" + "\n".join(body) + "\nret;\n}\n"
    )
    module = parse(text)
    found = wgmma_registers.unfenced(Flow(module.kernel("k")))
    return sorted((wgmma.number, -1 if other is None else other.number) for wgmma, other in found)


def test_one_fence_serves_a_chain():
    assert unfenced("mov.f32 %f0, 0f00000000;", FENCE, multiply(), multiply(), multiply(OTHER)) == []


def test_the_first_wgmma_wants_a_fence_whatever_its_registers():
    assert unfenced("mov.f32 %f9, 0f00000000;", multiply()) == [(1, -1)]


@pytest.mark.parametrize("fenced", [True, False])
def test_a_write_of_an_accumulator_wants_a_fence_after(fenced):
    body = [FENCE, multiply(), WAIT, "mov.f32 %f1, 0f00000000;", *([FENCE] if fenced else []), multiply()]
    assert unfenced(*body) == ([] if fenced else [(5, 4)])


@pytest.mark.parametrize("fenced", [True, False])
def test_a_write_of_a_in_registers_wants_a_fence_after(fenced):
    a = "{%r0,%r1,%r2,%r3}"
    body = [FENCE, multiply(a=a), WAIT, "mov.b32 %r2, 0;", *([FENCE] if fenced else []), multiply(OTHER, a)]
    assert unfenced(*body) == ([] if fenced else [(5, 4)])


@pytest.mark.parametrize("fenced", [True, False])
def test_a_read_of_an_accumulator_wants_a_fence_before_the_next_wgmma(fenced):
    body = [FENCE, multiply(), WAIT, "add.f32 %f9, %f9, %f1;", *([FENCE] if fenced else []), multiply()]
    assert unfenced(*body) == ([] if fenced else [(5, 4)])


@pytest.mark.parametrize("fenced", [True, False])
def test_a_read_counts_behind_another_products_fence_too(fenced):
    body = [FENCE, multiply(), FENCE, multiply(OTHER), WAIT, "add.f32 %f9, %f9, %f1;"]
    assert unfenced(*body, *([FENCE] if fenced else []), multiply()) == ([] if fenced else [(7, 6)])


def test_a_read_after_the_fence_of_the_next_wgmma_is_left_alone():
    # A compiler moves it there: what it reads has been waited for, and ptxas keeps its order with the wgmma.
    assert unfenced(FENCE, multiply(), WAIT, FENCE, "add.f32 %f9, %f9, %f1;", multiply()) == []


def test_a_read_of_another_register_wants_none():
    assert unfenced(FENCE, multiply(), WAIT, "add.f32 %f9, %f4, %f5;", multiply()) == []


def test_ways_that_meet_are_looked_at_each():
    body = [
        FENCE, "again:", multiply(), WAIT, "add.f32 %f9, %f9, %f1;", "setp.eq.u32 %p0, %r1, 0;", "@%p0 bra again;",
    ]  # fmt: skip
    assert unfenced(*body) == [(1, 4)]
