"""Tests that SASS from both tools is read right: instructions, families, widths and labels."""

from __future__ import annotations

import pytest

from rooflab.bench.compile import sass
from rooflab.bench.compile.sass import count_families, parse, width_bytes, widths

CUOBJDUMP = """
	code for sm_90a
		Function : first
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000e620000000800 */
        /*0010*/               @P0 LDG.E.64 R2, desc[UR6][R4.64] ;   /* 0x0000000000027919 */
        /*0020*/              @!P1 BRA 0x10 ;                        /* 0x0000000000027919 */
        /*0030*/                   EXIT ;                            /* 0x0000000000027919 */
        /*0040*/                   BRA 0x40;                         /* 0x0000000000027919 */
		..........

		Function : second
        /*0000*/                   @UP0 UTMALDG.2D [UR8], [UR12] ;   /* 0x0000000000027919 */
"""
NVDISASM = """
	.section	.text.first,"ax",@progbits
first:
.text.first:
        /*0000*/                   LDC R4, c[0x2][R0+0xc] ;
.L_x_32:
        /*0010*/                   BRX R4 -0x20      (*"BRANCH_TARGETS .L_x_33,.L_x_6"*);
.L_x_33:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
.L_x_6:
        /*0030*/                   EXIT ;
.L_x_9:
"""


def test_what_cuobjdump_prints():
    found = parse(CUOBJDUMP)
    assert list(found) == ["first", "second"]
    code = found["first"].instructions
    assert [(i.address, i.guard, i.opcode, i.operands) for i in code] == [
        (0x00, "", "LDC", "R1, c[0x0][0x28]"),
        (0x10, "@P0", "LDG.E.64", "R2, desc[UR6][R4.64]"),
        (0x20, "@!P1", "BRA", "0x10"),
        (0x30, "", "EXIT", ""),
        (0x40, "", "BRA", "0x40"),
    ]
    (copy,) = found["second"].instructions
    assert (copy.guard, copy.name, copy.family) == ("@UP0", "UTMALDG", "tma")


def test_what_nvdisasm_prints():
    code = parse(NVDISASM)["first"]
    assert code.labels == {".L_x_32": 0x10, ".L_x_33": 0x20, ".L_x_6": 0x30}
    assert code.instructions[1].operands.endswith('BRANCH_TARGETS .L_x_33,.L_x_6"*)')
    assert [i.opcode for i in code.instructions] == ["LDC", "BRX", "HGMMA.64x128x16.F32.BF16", "EXIT"]


def test_what_is_no_code_is_refused():
    for text in ("", "no code at all", "\t\tFunction : empty\n"):
        with pytest.raises(ValueError, match="sass: expected what cuobjdump or nvdisasm print"):
            parse(text)


def test_families_are_disjoint_and_counted_without_modifiers():
    names = [name for names in sass.FAMILIES.values() for name in names]
    assert len(names) == len(set(names))
    opcodes = {"HGMMA.64x128x16.F32.BF16": 3, "HMMA.16816.F32": 2, "HFMA2.MMA": 9, "LDL.64": 1, "STL": 4, "LDSM.16": 5}
    counts = count_families(opcodes.items())
    wanted = {"wgmma": 3, "mma": 2, "spill_load": 1, "spill_store": 4, "ldmatrix": 5}
    assert {family: number for family, number in counts.items() if number} == wanted
    assert set(counts) == set(sass.FAMILIES), "a family with none is there too"


def test_widths_are_whole_modifiers_and_the_worst_and_the_usual_are_told():
    for opcode, bytes_a_thread in {
        "LDG.E": 4,
        "LDG.E.U8": 1,
        "STG.E.64": 8,
        "LDGSTS.E.BYPASS.LTC128B.128": 16,
        "LDG.E.LTC128B": 4,
        "LDG.E.ENL2.256": 32,
    }.items():
        assert width_bytes(opcode) == bytes_a_thread, opcode
    opcodes = [("LDG.E.128", 4), ("LDG.E", 3), ("LDG.E.U16", 1), ("LDS.64", 9), ("LDGSTS.E.BYPASS.128", 2)]
    assert widths(opcodes, "LDG", "LDGSTS") == (2, 16) and widths(opcodes, "STG") == (None, None)
    assert widths([("LDG.E", 3), ("LDG.E.128", 3)], "LDG") == (4, 4), "the narrower of two"
