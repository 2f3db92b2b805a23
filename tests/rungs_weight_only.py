"""The ladders of the products with weights of eight and four bits: what each rung's compiled code shows over naive."""

from __future__ import annotations

import re

from rung_claims import calls, code, loop, rung

from rooflab.bench.compile.static import CompiledInfo
from rooflab.reference.spec import Case

SQUARE8 = "M={},N=8192,K=8192,bias=false"
SQUARE4 = "M={},N=8192,K=8192,zeros={},bias=false"
WEIGHTS_PER_MMA = 16 * 16


def is_a_stream(info: CompiledInfo, most: float) -> None:
    """Codes go from 16-byte loads to mma with nothing between but arithmetic in registers; `most` instructions of a
    thread for each weight."""
    inner = loop(info)
    assert inner.counts["mma"] > 0 and inner.counts["wgmma"] == inner.counts["cp_async"] == 0
    assert inner.counts["shared_load"] == inner.counts["shared_store"] == inner.counts["ldmatrix"] == 0
    assert info.stack_bytes == inner.counts["spill_load"] == 0
    opcodes = [instruction.opcode for instruction in inner.instructions]
    assert not any(opcode.startswith(("SHFL", "PRMT", "I2F")) for opcode in opcodes)
    assert any(re.fullmatch(r"LDG\.E.*\.NA\.128.*", opcode) for opcode in opcodes), "past L1, 16 bytes a lane"
    assert len(opcodes) * 32 / (inner.counts["mma"] * WEIGHTS_PER_MMA) < most


def is_fed_from_registers(info: CompiledInfo) -> None:
    """cp.async, and wgmma whose left operand is registers: codes pass shared memory once, as codes."""
    inner = loop(info)
    assert inner.counts["wgmma"] > 0 and inner.counts["cp_async"] > 0 and inner.counts["mma"] == 0
    assert inner.counts["shared_store"] == inner.counts["spill_load"] == info.stack_bytes == 0
    texts = [line for line in info.sass.splitlines() if "HGMMA" in line]
    assert texts and all(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", line) for line in texts)


@rung("gemm_w8a16/gemv")
def gemm_w8a16_gemv() -> None:
    """One launch for naive's four; 2.1 instructions of a thread for each weight, all in registers, in one wave."""
    assert calls("gemm_w8a16", "naive").names.total() >= 4
    info = code("gemm_w8a16", "gemv", "w8a16", SQUARE8.format(1))
    is_a_stream(info, 2.5)
    is_a_stream(code("gemm_w8a16", "gemv", "w8a16", SQUARE8.format(8)), 2.5)


@rung("gemm_w8a16/dequant_dot")
def gemm_w8a16_dequant_dot() -> None:
    """wgmma from registers, and no int8 is converted by an instruction that does one at a time."""
    info = code("gemm_w8a16", "dequant_dot", "w8a16", SQUARE8.replace("N=8192", "N=28672").format(64))
    is_fed_from_registers(info)
    assert not any(instruction.opcode.startswith("I2F") for instruction in loop(info).instructions)


@rung("gemm_w8a16/packed")
def gemm_w8a16_packed() -> None:
    """Many rows meet a block of channels after another, in bf16; few go the library's way."""
    many, few = (calls("gemm_w8a16", "packed", Case(M=M, N=256, K=4096, bias=False)).names for M in (64, 4))
    products = [sum(names[name] for name in names if "_linear_pointwise" in name) for names in (many, few)]
    assert products == [2, 0] and (many["_weight_int8pack_mm"], few["_weight_int8pack_mm"]) == (0, 1)


@rung("gemm_w4a16/gemv")
def gemm_w4a16_gemv() -> None:
    """One launch for naive's nine or so; 2 instructions of a thread for each weight, all in registers, in one wave,
    whatever the group: in groups of 32 the mma's spare columns keep the groups apart."""
    assert calls("gemm_w4a16", "naive").names.total() >= 8
    for scheme in ("w4a16_g128", "w4a16_g64", "w4a16_g32"):
        for zeros in ("false", "true"):
            is_a_stream(code("gemm_w4a16", "gemv", scheme, SQUARE4.format(1, zeros)), 2.2)
    one, four = (loop(code("gemm_w4a16", "gemv", "w4a16_g128", SQUARE4.format(M, "false"))) for M in (1, 4))
    assert one.counts["mma"] == four.counts["mma"], "rows of a up to eight are columns of the same mma"


@rung("gemm_w4a16/dequant_dot")
def gemm_w4a16_dequant_dot() -> None:
    """wgmma from registers in every group, with one fp32 multiply-add for each sum of a group."""
    for scheme in ("w4a16_g128", "w4a16_g64", "w4a16_g32"):
        is_fed_from_registers(
            code("gemm_w4a16", "dequant_dot", scheme, SQUARE4.replace("N=8192", "N=28672").format(64, "false"))
        )
