"""PTX instructions by their texts: each row has an instruction, its operands, and the result that PTX defines."""

from __future__ import annotations

import struct
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from ptx_lines import launch

ONES = 0xFFFFFFFF
REGISTERS = {"h": ("b16", "<H"), "r": ("b32", "<I"), "d": ("b64", "<Q"), "f": ("f32", "<f"), "e": ("f64", "<d")}
"""By the letter of a register: the type that moves it, and its bits."""
INSTRUCTIONS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    # The instruction, the letters of its result's register and of its operands', the operands, the result.
    ("add.s64", "ddd", (-7, 2**40), 2**40 - 7),
    ("sub.u64", "ddd", (3, 5), -2),
    ("mul.lo.s64", "ddd", (-3, 2**33), -3 << 33),
    ("mul.hi.s64", "ddd", (-(2**62), 6), -2),
    ("mul.hi.u64", "ddd", (2**63, 6), 3),
    ("div.s64", "ddd", (-7, 2), -3),
    ("div.u64", "ddd", (-2, 2), 2**63 - 1),
    ("rem.s64", "ddd", (-7, 2), -1),
    ("mul.wide.s32", "drr", (-3, 2**30), -3 << 30),
    ("mul.wide.u32", "drr", (-1, 2), 2 * ONES),
    ("mad.wide.s16", "rhhr", (-3, 7, 100), 79),
    ("mad.lo.s32", "rrrr", (-3, 7, 1), -20),
    ("mad.hi.u32", "rrrr", (-1, -1, 3), 1),
    ("add.sat.s32", "rrr", (2**31 - 1, 9), 2**31 - 1),
    ("shl.b64", "ddr", (5, 40), 5 << 40),
    ("shl.b32", "rrr", (5, 32), 0),
    ("shr.s64", "ddr", (-16, 70), -1),
    ("shr.u64", "ddr", (-16, 60), 15),
    ("shr.s16", "hhr", (-16, 2), -4),
    ("min.s64", "ddd", (-1, 1), -1),
    ("max.u64", "ddd", (-1, 1), -1),
    ("abs.s64", "dd", (-5,), 5),
    ("and.b64", "ddd", (12, 10), 8),
    ("xor.b32", "rrr", (12, 10), 6),
    ("not.b64", "dd", (0,), -1),
    ("cnot.b32", "rr", (0,), 1),
    ("cnot.b32", "rr", (7,), 0),
    ("popc.b64", "rd", (-1,), 64),
    ("clz.b64", "rd", (1,), 63),
    ("bfind.s32", "rr", (-9,), 3),
    ("bfind.shiftamt.u32", "rr", (8,), 28),
    ("brev.b32", "rr", (1,), 1 << 31),
    ("bfe.s32", "rrrr", (0x380, 7, 3), -1),
    ("bfe.u64", "ddrr", (0x380, 7, 3), 7),
    ("bfi.b32", "rrrrr", (5, ONES, 4, 4), 0xFFFFFF5F),
    ("fns.b32", "rrrr", (0b1010, 0, 2), 3),
    ("fns.b32", "rrrr", (0b1010, 3, -2), 1),
    ("fns.b32", "rrrr", (0b1000, 0, 2), ONES),
    ("bmsk.clamp.b32", "rrr", (28, 9), 0xF0000000),
    ("bmsk.wrap.b32", "rrr", (33, 34), 6),
    ("szext.wrap.s32", "rrr", (0xF8, 40), -8),
    ("szext.clamp.u32", "rrr", (0x1F8, 40), 0x1F8),
    ("lop3.b32", "rrrr", (12, 10, 9), 12 ^ 10 ^ 9),
    ("prmt.b32", "rrrr", (0x33221100, 0x77665544, 0x5240), 0x55224400),
    ("shf.l.wrap.b32", "rrrr", (0x80000000, 1, 1), 3),
    ("shf.r.clamp.b32", "rrrr", (0, 1, 32), 1),
    ("sad.s32", "rrrr", (-3, 4, 7), 14),
    ("dp4a.s32.s32", "rrrr", (0xFF02FF02, 0x01030103, 5), 15),
    ("dp2a.lo.u32.u32", "rrrr", (0x00030002, 0x0504, 1), 24),
    ("dp2a.hi.s32.u32", "rrrr", (0x0003FFFE, 0x05040000, 1), 8),
    ("mul24.lo.s32", "rrr", (0xFFFFFF, 5), -5),
    ("mad24.hi.s32", "rrrr", (0x7FFFFF, 0x7FFFFF, 2**31 - 1), 2**31 - 1 + (0x7FFFFF**2 >> 16)),
    ("mad24.hi.sat.s32", "rrrr", (0x7FFFFF, 0x7FFFFF, 2**31 - 1), 2**31 - 1),
    # The upper half of a product with carry is signed where its type is.
    ("mad.hi.cc.s32", "rrrr", (-1, -1, 0), 0),
    ("mad.hi.cc.u32", "rrrr", (-1, -1, 0), ONES - 1),
    # Packed integers keep to their halves, and relu clamps.
    ("add.u16x2", "rrr", (0x00018001, 0x00018001), 0x00020002),
    ("min.s16x2", "rrr", (0xFFFB0007, 0x00020002), 0xFFFB0002),
    ("max.u16x2", "rrr", (0xFFFB0001, 0x00020002), 0xFFFB0002),
    ("max.relu.s16x2", "rrr", (0xFFFB0003, 0xFFFB0003), 3),
    ("min.relu.s32", "rrr", (-5, 9), 0),
    ("cvt.pack.sat.u8.s32.b32", "rrrr", (1000, 1000, 5), 0x05FFFF),
    ("cvt.pack.sat.s8.s32.b32", "rrrr", (1000, 1000, 5), 0x057F7F),
    ("cvt.pack.sat.u4.s32.b32", "rrrr", (1000, 1000, 5), 0x5FF),
    ("cvt.pack.sat.s2.s32.b32", "rrrr", (1000, 1000, 5), 0x55),
    # Floats.
    ("add.rp.f32", "fff", (1.0, 1e-9), 1 + 2**-23),
    ("sub.rm.f64", "eee", (1.0, 1e-20), 1 - 2**-53),
    ("mul.rz.f32", "fff", (1 + 2**-23, 1 + 2**-23), 1 + 2**-22),
    ("mul.ftz.f32", "fff", (1e-20, 1e-20), 0.0),
    ("add.sat.f32", "fff", (0.75, 0.75), 1.0),
    ("fma.rn.f64", "eeee", (3.0, 5.0, 0.5), 15.5),
    ("div.rn.f64", "eee", (1.0, 3.0), 1 / 3),
    ("div.approx.f32", "fff", (1.0, 4.0), 0.25),
    ("rcp.rn.f64", "ee", (8.0,), 0.125),
    ("sqrt.rn.f64", "ee", (2.0,), 2**0.5),
    ("rsqrt.approx.f32", "ff", (4.0,), 0.5),
    ("ex2.approx.f32", "ff", (-3.0,), 0.125),
    ("lg2.approx.f32", "ff", (8.0,), 3.0),
    ("sin.approx.f32", "ff", (0.0,), 0.0),
    ("tanh.approx.f32", "ff", (inf,), 1.0),
    ("min.f32", "fff", (nan, 2.0), 2.0),
    ("max.NaN.f32", "rff", (nan, 2.0), 0x7FFFFFFF),
    ("max.f64", "eee", (-1.0, 2.0), 2.0),
    ("max.xorsign.abs.f32", "fff", (-3.0, 2.0), -3.0),
    ("abs.f64", "ee", (-2.0,), 2.0),
    ("neg.f32", "ff", (2.0,), -2.0),
    ("copysign.f32", "fff", (-1.0, 5.0), -5.0),
    ("testp.finite.f32", "pf", (-inf,), 0),
    ("testp.infinite.f32", "pf", (-inf,), 1),
    ("testp.number.f32", "pf", (nan,), 0),
    ("testp.notanumber.f32", "pf", (nan,), 1),
    ("testp.normal.f32", "pf", (-0.0,), 1),
    ("testp.subnormal.f32", "pf", (1e-40,), 1),
    ("testp.normal.f64", "pe", (5e-324,), 0),
    # 16 bits: 1.5 is 3E00 in f16 and 3FC0 in bf16.
    ("add.f16", "hhh", (0x3E00, 0x3E00), 0x4200),
    ("fma.rn.f16", "hhhh", (0x3E00, 0x4000, 0x3C00), 0x4400),
    ("mul.bf16", "hhh", (0x3FC0, 0x4000), 0x4040),
    ("sub.f16x2", "rrr", (0x3E004200, 0x3C003E00), 0x38003E00),
    ("fma.rn.relu.bf16x2", "rrrr", (0x3FC0BFC0, 0x40004000, 0x3F803F80), 0x40800000),
    ("max.f16x2", "rrr", (0x3E00BE00, 0x3C003C00), 0x3E003C00),
    ("neg.bf16", "hh", (0x3FC0,), 0xBFC0),
    ("abs.f16", "hh", (0xBE00,), 0x3E00),
    ("ex2.approx.f16", "hh", (0x3C00,), 0x4000),
    # Conversions.
    ("cvt.rni.s32.f32", "rf", (2.5,), 2),
    ("cvt.rmi.s64.f64", "de", (-2.5,), -3),
    ("cvt.rzi.u32.f32", "rf", (-7.0,), 0),
    ("cvt.rn.f32.s64", "fd", (-(2**40),), -(2.0**40)),
    ("cvt.rz.f32.s32", "fr", (2**24 + 1,), 2.0**24),
    ("cvt.f64.f32", "ef", (0.5,), 0.5),
    ("cvt.u64.u32", "dr", (-5,), 2**32 - 5),
    ("cvt.s32.s8", "rr", (0x1F0,), -16),
    ("cvt.sat.u8.s32", "hr", (300,), 255),
    ("cvt.rmi.f32.f32", "ff", (-1.5,), -2.0),
    ("cvt.rn.f16.f32", "hf", (1.5,), 0x3E00),
    ("cvt.f32.bf16", "fh", (0x3FC0,), 1.5),
    ("cvt.rn.bf16x2.f32", "rff", (1.5, -1.5), 0x3FC0BFC0),
    ("cvt.rn.satfinite.e4m3x2.f32", "hff", (448.0, 1e9), 0x7E7E),
    ("cvt.rn.f16x2.e5m2x2", "rh", (0x3C3E,), 0x3C003E00),
    # Comparisons and choices.
    ("setp.lt.s64", "pdd", (-1, 1), 1),
    ("setp.lo.u64", "pdd", (-1, 1), 0),
    ("setp.geu.f32", "pff", (nan, 1.0), 1),
    ("setp.ne.f64", "pee", (nan, 1.0), 0),
    ("setp.num.f32", "pff", (nan, 1.0), 0),
    ("set.gt.u32.f32", "rff", (2.0, 1.0), ONES),
    ("set.gt.f32.s32", "frr", (2, 1), 1.0),
    ("slct.s32.s32", "rrrr", (5, 6, -1), 6),
]


def bits(letter: str, value: Any) -> int:
    """Those of a register; a negative integer is its two's complement."""
    form = REGISTERS[letter][1]
    size = struct.calcsize(form)
    return int.from_bytes(struct.pack(form, value if letter in "fe" else value % 256**size), "little")


@pytest.mark.parametrize("loaded", [False, True], ids=["constants", "loaded"])
@pytest.mark.parametrize(("instruction", "letters", "operands", "wanted"), INSTRUCTIONS)
def test_an_instruction_gives(
    instruction: str, letters: str, operands: tuple[Any, ...], wanted: Any, loaded: bool
) -> None:
    """Operands in the text have one value for all lanes; what each lane loads is a vector."""
    given = [bits(letter, value) for letter, value in zip(letters[1:], operands, strict=True)]
    names = [f"%{letters[0]}3", *(f"%{letter}{4 + place}" for place, letter in enumerate(letters[1:]))]
    body = "mul.wide.u32 %d1, %r0, 0; add.u64 %d1, %d0, %d1; mul.wide.u32 %d2, %r0, 8; add.u64 %d2, %d0, %d2;"
    for place, (letter, value) in enumerate(zip(letters[1:], given, strict=True)):
        source = {"f": f"0f{value:08X}", "e": f"0d{value:016X}"}.get(letter, f"{value:#x}")
        kind = REGISTERS[letter][0]
        body += f"ld.global.{kind} {names[place + 1]}, [%d1+{8 * place}];" if loaded else ""
        body += "" if loaded else f"mov.{kind} {names[place + 1]}, {source};"
    body += f"{instruction} {', '.join([*names, *['0x96'] * instruction.startswith('lop3')])};"
    letter = letters[0].replace("p", "r")
    body += f"selp.u32 %r3, 1, 0, {names[0]};" if letters[0] == "p" else ""
    body += f"st.global.{REGISTERS[letter][0]} [%d2+64], %{letter}3; add.u64 %d2, %d2, 320; mov.u32 %r1, 0;"
    memory = np.zeros(256, np.uint64)
    memory[: len(given)] = given
    launch(body, to=torch.from_numpy(memory.view(np.int64)))
    assert memory[8:40].tolist() == [bits(letter, wanted)] * 32


START = "ld.global.b32 %r1, [%d2]; mov.b32 %f1, %r1; cvt.u16.u32 %h1, %r1; "
"""Lane i has the i-th of the given words in %r1, %f1 and %h1, and leaves %r2."""


def results(body: str, given: Any = 0, outer: str = "") -> list[int]:
    """What 32 lanes leave in %r2."""
    words = np.broadcast_to(np.asarray(given, np.uint32), 32).copy().view(np.int32)
    found, _ = launch(START + body + " mov.b32 %r1, %r2;", to=torch.from_numpy(words), outer=outer)
    return [value % 2**32 for value in found]


SAID = "selp.u32 %r2, 1, 0, %p1;"
BOTH = "selp.u32 %r2, 1, 0, %p1; selp.u32 %r4, 2, 0, %p2; or.b32 %r2, %r2, %r4;"
CALL = """.func (.param .b32 r) twice(.param .b32 a) {
    .reg .b32 %x; .reg .pred %p; ld.param.b32 %x, [a]; setp.eq.u32 %p, %x, 0; @%p bra LAST; add.u32 %x, %x, %x;
    LAST: st.param.b32 [r], %x; ret; }"""
CALLED = """add.u32 %r3, %r1, 21; { .param .b32 p; .param .b32 q; st.param.b32 [p], %r3; call.uni (q), twice, (p);
    ld.param.b32 %r2, [q]; }"""
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
        # The upper half of a product with carry takes the carry of the sum before it.
        ("add.cc.u32 %r3, %r1, %r1; madc.hi.s32 %r2, %r1, %r1, 0;", ONES, 1),
        # Results are made from the operands as they were.
        ("setp.eq.u32 %p1, %r1, %r1; setp.lt.and.u32 %p1|%p2, %r1, %r1, %p1; selp.u32 %r2, 1, 0, %p2;", 0, 1),
        # A float in a wider register is its bits.
        *[
            (f"{made} {taken}", bits("f", 1), wanted)
            for made in ("ld.global.f32 %d5, [%d2];", "cvt.rn.f32.u32 %d5, 1;")
            for taken, wanted in (
                ("shr.u64 %d6, %d5, 32; cvt.u32.u64 %r2, %d6;", 0),
                ("cvt.u32.u64 %r2, %d5;", bits("f", 1)),
            )
        ],
        *[
            (f"setp.eq.u32 %p1, %r1, 0; {opcode}.u32 %r2, 0, %p1;", 0, 32)
            for opcode in ("bar.red.popc", "barrier.red.popc.aligned", "barrier.cta.red.popc.aligned")
        ],
        # What nobody wrote is poison and no error, and a breakpoint that no lane reaches does nothing.
        ("setp.ne.u32 %p1, 1, 1; @%p1 mov.u32 %r5, 7; add.u32 %r6, %r5, 1; mov.u32 %r2, 4;", 0, 4),
        ("mov.u32 %r2, 5; setp.ne.u32 %p1, %r1, 0; @%p1 brkpt; add.u32 %r2, %r2, 1;", 0, 6),
    ],
)
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


@pytest.mark.parametrize("seed", range(4))
def test_lanes_keep_what_each_of_three_ways_left_them(seed: int) -> None:
    body = """setp.lt.u32 %p1, %r0, 10; @%p1 bra one; setp.lt.u32 %p1, %r0, 20; @%p1 bra two; mov.u32 %r2, 5; bra end;
        one: mov.u32 %r2, 5; bra end; two: mov.u32 %r2, 7; end: mov.u32 %r3, s;
        mad.lo.u32 %r4, %r0, 4, %r3; st.shared.u32 [%r4], %r2; bar.warp.sync -1; xor.b32 %r4, %r4, 64;
        ld.shared.u32 %r3, [%r4]; mad.lo.u32 %r1, %r3, 10, %r2;"""
    wanted = [5] * 10 + [7] * 10 + [5] * 12
    assert launch(body, declared=".shared .align 128 .b32 s[32];", seed=seed)[0] == [
        10 * wanted[lane ^ 16] + wanted[lane] for lane in range(32)
    ]


def mask(lanes: Any) -> int:
    """The bits of lanes, in two's complement of a result."""
    return sum(1 << lane for lane in lanes)


VALUES = [lane % 3 for lane in range(32)]
SAME = [mask(range(value, 32, 3)) for value in VALUES]
OF_SAME = [[lane for lane in range(32) if VALUES[lane] == value] for value in VALUES]
LOW = "setp.lt.u32 %p1, %r1, 1;"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (f"{LOW} vote.sync.ballot.b32 %r2, %p1, -1;", [SAME[0]] * 32),
        (f"{LOW} vote.sync.any.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;", [1] * 32),
        (f"{LOW} vote.sync.all.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;", [0] * 32),
        ("match.any.sync.b32 %r2, %r1, -1;", SAME),
        ("match.all.sync.b32 %r2|%p2, %r1, -1;", [0] * 32),
        ("mov.u32 %r3, 9; match.all.sync.b32 %r2|%p2, %r3, -1; selp.u32 %r2, %r2, 0, %p2;", [0xFFFFFFFF] * 32),
        # One instruction serves several masks of a warp.
        ("match.any.sync.b32 %r3, %r1, -1; redux.sync.add.s32 %r2, %r0, %r3;", [sum(lanes) for lanes in OF_SAME]),
        ("match.any.sync.b32 %r3, %r1, -1; redux.sync.max.u32 %r2, %r0, %r3;", [max(lanes) for lanes in OF_SAME]),
        ("match.any.sync.b32 %r3, %r1, -1; shfl.sync.idx.b32 %r2, %r0, %r1, 31, %r3;", VALUES),
        # Each half of the warp shuffles by itself, on its own way.
        (
            f"setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW; shfl.sync.up.b32 %r2, %r0, 1, 0x1000, {0xFFFF0000}; bra END;"
            "LOW: shfl.sync.bfly.b32 %r2, %r0, 8, 0x101f, 0xffff; END: add.u32 %r2, %r2, 0;",
            [*(lane ^ 8 for lane in range(16)), 16, *range(16, 31)],
        ),
    ],
)
def test_lanes_exchange(body: str, wanted: list[int]) -> None:
    assert results(body, VALUES) == wanted


@pytest.mark.parametrize("written", ["1.5", "15e-1", "0f3FC00000", "0d3FF8000000000000"])
def test_constants_of_floats_have_the_width_that_is_wanted(written: str) -> None:
    body = f"""st.global.f32 [%d2], {written}; ld.global.b32 %r2, [%d2];
        mov.f32 %f2, {written}; mov.b32 %r3, %f2; xor.b32 %r4, %r3, %r2;
        mov.f64 %e1, {written}; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r3, %f2; xor.b32 %r5, %r3, %r2; or.b32 %r4, %r4, %r5;
        ld.global.f64 %e1, [g+8]; cvt.rn.f32.f64 %f2, %e1; mov.b32 %r3, %f2; xor.b32 %r5, %r3, %r2;
        or.b32 %r4, %r4, %r5; ld.global.b32 %r3, [h]; xor.b32 %r5, %r3, %r2; or.b32 %r4, %r4, %r5;
        add.u32 %r2, %r2, %r4;"""
    outer = f".global .align 8 .f64 g[2] = {{0d0000000000000000, {written}}}; .global .align 4 .f32 h = {written};"
    assert results(body, outer=outer) == [bits("f", 1.5)] * 32


@pytest.mark.parametrize(
    ("outer", "body", "wanted"),
    [
        *[(ROWS, f"ld.global.b32 %r2, [g+{4 * at}];", value) for at, value in enumerate((1, 0, 3, 0))],  # filled with 0
        (VECTORS, "mov.u32 %r3, a; mov.u32 %r4, b; sub.u32 %r2, %r4, %r3;", 64),
        (VECTORS, "ld.global.b32 %r2, [g+8];", 3),
        (CALL, CALLED, 42),
        (SHARED, "mov.u32 %r2, s+12; mov.u32 %r3, s; sub.u32 %r2, %r2, %r3;", 12),
    ],
)
def test_variables_have_all_their_bytes(outer: str, body: str, wanted: int) -> None:
    assert results(body, outer=outer) == [wanted] * 32
