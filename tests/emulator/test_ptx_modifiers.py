"""Modifiers and forms of operands that compilers write seldom: each means what PTX says."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from ptx_lines import launch

START = "ld.global.b32 %r1, [%d2]; mov.b32 %f1, %r1; cvt.u16.u32 %h1, %r1; "
"""Lane i has the i-th of the given words in %r1, %f1 and %h1, and leaves %r2."""


def results(body: str, given: Any = 0, outer: str = "") -> list[int]:
    """What 32 lanes leave in %r2."""
    words = np.broadcast_to(np.asarray(given, np.uint32), 32).copy().view(np.int32)
    found, _ = launch(START + body + " mov.b32 %r1, %r2;", to=torch.from_numpy(words), outer=outer)
    return [value % 2**32 for value in found]


def bits(value: float) -> int:
    """Those of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


SAID = "selp.u32 %r2, 1, 0, %p1;"
BOTH = "selp.u32 %r2, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; or.b32 %r2, %r2, %r4;"
ONES = 0xFFFFFFFF
SHARED = ".shared .align 16 .b8 s[64];"
VECTORS = ".shared .v4 .f32 a[4]; .shared .f32 b; .global .v2 .b32 g[2] = {{1, 2}, {3, 4}};"
ROWS = ".global .align 4 .b32 g[2][2] = {{1}, {3}};"


@pytest.mark.parametrize("given", [5, 0x80000005])
@pytest.mark.parametrize("ftz", [True, False])
def test_comparisons_flush_denormals_where_they_say_so(given: int, ftz: bool) -> None:
    dot = ".ftz" if ftz else ""
    for body, wanted in (
        (f"setp.eq{dot}.f32 %p1, %f1, 0f00000000; {SAID}", ftz),
        (f"mov.b16 %h2, 0; setp.eq{dot}.f16 %p1, %h1, %h2; {SAID}", ftz),
        (f"set.ne{dot}.u32.f32 %r2, %f1, 0f00000000;", 0 if ftz else ONES),
        (f"slct{dot}.u32.f32 %r2, 1, 2, %f1;", 1 if ftz or given == 5 else 2),
    ):
        assert results(body, given) == [wanted] * 32, body
    packed = f"mov.b32 %r3, 0; setp.eq{dot}.f16x2 %p1|%p2, %r1, %r3; {BOTH}"
    assert results(packed, 0x40008001) == [int(ftz)] * 32


@pytest.mark.parametrize(
    ("body", "given", "wanted"),
    [
        # Packed integers keep to their halves, and relu clamps.
        ("add.u16x2 %r2, %r1, %r1;", 0x00018001, 0x00020002),
        ("add.s16x2 %r2, %r1, %r1;", 0x8000FFFF, 0x0000FFFE),
        ("mov.u32 %r3, 0x00020002; min.s16x2 %r2, %r1, %r3;", 0xFFFB0007, 0xFFFB0002),
        ("mov.u32 %r3, 0x00020002; max.u16x2 %r2, %r1, %r3;", 0xFFFB0001, 0xFFFB0002),
        ("max.relu.s16x2 %r2, %r1, %r1;", 0xFFFB0003, 0x00000003),
        ("min.relu.s32 %r2, %r1, 9;", 0xFFFFFFFB, 0),
        ("max.relu.s32 %r2, %r1, %r1;", 0xFFFFFFFB, 0),
        ("mad24.hi.sat.s32 %r2, %r1, %r1, 0x7fffffff;", 0x7FFFFF, 0x7FFFFFFF),
        ("mad24.hi.s32 %r2, %r1, %r1, 0x7fffffff;", 0x7FFFFF, (0x7FFFFFFF + (0x7FFFFF**2 >> 16)) % 2**32),
        # The upper half of a product with carry is signed where its type is.
        ("mad.hi.cc.s32 %r2, %r1, %r1, 0;", ONES, 0),
        ("mad.hi.cc.u32 %r2, %r1, %r1, 0;", ONES, 0xFFFFFFFE),
        ("add.cc.u32 %r3, %r1, %r1; madc.hi.s32 %r2, %r1, %r1, 0;", ONES, 1),
        *[(f"cvt.pack.sat.{kind}.s32.b32 %r2, %r1, %r1, 5;", 1000, wanted) for kind, wanted in (
            ("u8", 0x05FFFF), ("s8", 0x057F7F), ("u4", 0x5FF), ("s4", 0x577), ("u2", 0x5F), ("s2", 0x55))],
        # Results are made from the operands as they were.
        ("setp.eq.u32 %p1, %r1, %r1; setp.lt.and.u32 %p1|%p2, %r1, %r1, %p1; selp.u32 %r2, 1, 0, %p2;", 0, 1),
        # A float in a wider register is its bits.
        *[(f"{made} {taken}", bits(1), wanted)
          for made in ("ld.global.f32 %d5, [%d2];", "cvt.rn.f32.u32 %d5, 1;")
          for taken, wanted in (("shr.u64 %d6, %d5, 32; cvt.u32.u64 %r2, %d6;", 0),
                                ("cvt.u32.u64 %r2, %d5;", bits(1)))],
        *[(f"setp.eq.u32 %p1, %r1, 0; {opcode}.u32 %r2, 0, %p1;", 0, 32)
          for opcode in ("bar.red.popc", "barrier.red.popc.aligned", "barrier.cta.red.popc.aligned")],
        # What nobody wrote is poison and no error, and a breakpoint that no lane reaches does nothing.
        ("setp.ne.u32 %p1, 1, 1; @%p1 mov.u32 %r5, 7; add.u32 %r6, %r5, 1; mov.u32 %r2, 4;", 0, 4),
        ("mov.u32 %r2, 5; setp.ne.u32 %p1, %r1, 0; @%p1 brkpt; add.u32 %r2, %r2, 1;", 0, 6),
    ],
)  # fmt: skip
def test_all_lanes_get(body: str, given: int, wanted: int) -> None:
    assert results(body, given) == [wanted] * 32


@pytest.mark.parametrize(
    ("body", "wanted", "rest"),
    [
        # A lane without the predicate keeps its carry.
        ("setp.lt.u32 %p1, %r1, 2; mov.u32 %r4, -1; add.cc.u32 %r3, %r4, %r4; @%p1 add.cc.u32 %r3, %r1, 0;"
         " addc.u32 %r2, 0, 0;", [0, 0], 1),
        ("setp.lt.u32 %p1, %r1, 4; setp.ne.u32 %p2, %r1, %r1; @%p1 setp.ge.u32 %p1|%p2, %r1, 2;"
         " selp.u32 %r2, 1, 0, %p2;",
         [1, 1], 0),
        *[(f"setp.lt.u32 %p1, %r1, 2; not.pred %p2, %p1; mov.u32 %r2, 3; {guard} mov.u32 %r2, 7;", [7, 7], 3)
          for guard in ("@%p1", "@ %p1", "@!%p2", "@! %p2")],
        # A jump by a table leaves lanes without the predicate.
        ("setp.lt.u32 %p1, %r1, 2; table: .branchtargets one, two; @%p1 brx.idx %r1, table; mov.u32 %r2, 9; bra end;"
         " one: mov.u32 %r2, 1; bra end; two: mov.u32 %r2, 2; end: add.u32 %r2, %r2, 0;", [1, 2], 9),
        ("setp.lt.u32 %p1, %r1, 2; @%p1 mov.u32 %r5, 7; mov.u32 %r2, %r5;", [7, 7], ONES),
    ],
)  # fmt: skip
def test_the_first_lanes_get(body: str, wanted: list[int], rest: int) -> None:
    assert results(body, range(32)) == [*wanted, *[rest] * 30]


@pytest.mark.parametrize("written", ["1.5", "15e-1", "0f3FC00000", "0d3FF8000000000000"])
def test_constants_of_floats_have_the_width_that_is_wanted(written: str) -> None:
    body = f"""st.global.f32 [%d2], {written}; ld.global.b32 %r2, [%d2];
        mov.f32 %f2, {written}; mov.b32 %r3, %f2; xor.b32 %r4, %r3, %r2;
        mov.f64 %e1, {written}; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r3, %f2; xor.b32 %r5, %r3, %r2; or.b32 %r4, %r4, %r5;
        ld.global.f64 %e1, [g+8]; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r3, %f2; xor.b32 %r5, %r3, %r2;
        or.b32 %r4, %r4, %r5; ld.global.b32 %r3, [h]; xor.b32 %r5, %r3, %r2; or.b32 %r4, %r4, %r5;
        add.u32 %r2, %r2, %r4;"""
    outer = f".global .align 8 .f64 g[2] = {{0d0000000000000000, {written}}}; .global .align 4 .f32 h = {written};"
    assert results(body, outer=outer) == [bits(1.5)] * 32


@pytest.mark.parametrize(
    ("outer", "body", "wanted"),
    [
        *[(ROWS, f"ld.global.b32 %r2, [g+{4 * at}];", value) for at, value in enumerate((1, 0, 3, 0))],  # filled with 0
        (VECTORS, "mov.u32 %r3, a; mov.u32 %r4, b; sub.u32 %r2, %r4, %r3;", 64),
        (VECTORS, "ld.global.b32 %r2, [g+8];", 3),
        (SHARED, "mov.u32 %r2, s+12; mov.u32 %r3, s; sub.u32 %r2, %r2, %r3;", 12),
    ],
)
def test_variables_have_all_their_bytes(outer: str, body: str, wanted: int) -> None:
    assert results(body, outer=outer) == [wanted] * 32
