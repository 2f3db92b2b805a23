"""The ladders of the products beside gemm: in fp8, gated, grouped, and with weights of eight and four bits."""

from __future__ import annotations

import re

import torch
from rung_claims import calls, code, fetched_by_tma, loop, new_sums, one_loop_on_all_sms, rung, specialized

from rooflab.bench.compile.static import CompiledInfo
from rooflab.kernels.registry import ops
from rooflab.reference.spec import Case

PER_TENSOR = "M=2048,N=28672,K=4096,scales=tensor,bias=false,fast_accum=true"
PER_BLOCK = "M=2048,N=28672,K=4096,scales=block,bias=false"


def _fp8(name: str, case: str = PER_TENSOR) -> CompiledInfo:
    return code("gemm_fp8", name, "fp8_e4m3", case)


def _added(info: CompiledInfo, opcode: str) -> int:
    return sum(instruction.opcode.split(".")[0] == opcode for instruction in loop(info).instructions)


@rung("gemm_fp8/fast_accum")
def gemm_fp8_fast_accum() -> None:
    """One launch in place of torch's steps; wgmma fed by TMA, whose sums nothing else touches in the loop."""
    assert calls("gemm_fp8", "naive").names.total() >= 6
    info = _fp8("fast_accum")
    counts = loop(info).counts
    assert counts["wgmma"] == 4 and counts["tma"] == 2 and counts["fma"] == 0 and not info.spill_stores
    assert _added(info, "FADD") == 0 and new_sums(info)[0] == 0


@rung("gemm_fp8/promoted", slow=True)
def gemm_fp8_promoted() -> None:
    """Every fourth wgmma, of 32 of K each, begins a new sum, and every accumulator is added up once for it."""
    for case, opcode in ((PER_TENSOR, "FADD"), (PER_BLOCK, "FFMA")):
        info = _fp8("promoted", case)
        assert loop(info).counts["wgmma"] == 4 and loop(info).counts["tma"] == 2 and not info.spill_stores
        assert new_sums(info) == (1, 4)
        assert _added(info, opcode) == 128 * 128 // info.threads


@rung("gemm_fp8/promoted_ws", slow=True)
def gemm_fp8_promoted_ws() -> None:
    """Consumers' loops load no tile, the producer's multiplies nothing; a grid of one wave; nothing spills."""
    for case, opcode in ((PER_TENSOR, "FADD"), (PER_BLOCK, "FFMA")):
        info = _fp8("promoted_ws", case)
        assert info.uses_warp_specialization and info.threads == 3 * 128 and info.grid[0] == 132
        assert not info.spill_stores and new_sums(info) == (2, 8)
        assert loop(info).counts["wgmma"] == 4 and loop(info).counts["tma"] == 0
        assert _added(info, opcode) == 64 * 128 // 128
        assert any(each.counts["tma"] == 3 and not each.counts["wgmma"] for each in info.loops)


@rung("gemm_fp8/multicast", slow=True)
def gemm_fp8_multicast() -> None:
    """As promoted_ws, and of each step's copies one goes to both CTAs of the cluster."""
    for case, opcode in ((PER_TENSOR, "FADD"), (PER_BLOCK, "FFMA")):
        info = _fp8("multicast", case)
        assert info.threads in (384, 512) and info.ctas % 2 == 0 and not info.warnings
        (inner,) = [found for found in info.loops if found.innermost and found.counts["wgmma"]]
        assert inner.counts["wgmma"] == 4 and not inner.counts["tma"] and not inner.counts["spill_load"]
        assert _added(info, opcode) >= 64 * 128 // 128
        assert info.opcodes["UTMALDG.2D.MULTICAST"] == 1 and info.opcodes["UTMALDG.2D"] == info.threads // 128 - 1


PREFILL = "M=2048,I=14336,K=4096,layout=NT"
MIXTRAL = "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0"


def gated(name: str, scheme: str = "bf16") -> CompiledInfo:
    return code("gemm_silu_and_mul", name, scheme, PREFILL)


def grouped(name: str, scheme: str = "bf16") -> CompiledInfo:
    return code("gemm_grouped", name, scheme, MIXTRAL)


@rung("gemm_silu_and_mul/fused")
def gemm_silu_and_mul_fused() -> None:
    """One launch for library's three calls: exp stands behind the products' loop, and half as much is stored."""
    assert calls("gemm_silu_and_mul", "library").names.total() == 3
    info = gated("fused")
    inner = loop(info).counts
    assert inner["wgmma"] == 4 and inner["cp_async"] > 0 and inner["global_load"] == inner["special_function"] == 0
    assert "m64n256k16" in info.ptx, "gate and up are one operand"
    outputs = 128 * 128 * 2 // (16 * info.threads)
    assert info.opcodes["STG.E.128"] == info.counts["global_store"] == outputs
    assert info.stack_bytes == 0 and not gated("fused", "fp32").uses_tf32


@rung("gemm_silu_and_mul/tma")
def gemm_silu_and_mul_tma() -> None:
    """Two instructions fetch a tile, both halves of B in one box, and the result leaves by TMA."""
    fetched_by_tma(gated("fused"), gated("tma"))
    assert gated("tma").counts["global_store"] == 0


@rung("gemm_silu_and_mul/persistent")
def gemm_silu_and_mul_persistent() -> None:
    """As many CTAs as SMs; one loop holds loads, products, the activation and the stores."""
    one_loop_on_all_sms(gated("tma"), gated("persistent"), stores=1)


@rung("gemm_silu_and_mul/cooperative")
def gemm_silu_and_mul_cooperative() -> None:
    """A warp loads and two warpgroups multiply, each 64 rows by 256 columns."""
    info = gated("cooperative")
    specialized(gated("persistent"), info)
    assert "m64n256k16" in info.ptx and loop(info).counts["wgmma"] == 4 and info.counts["global_store"] == 0


@rung("gemm_grouped/grouped")
def gemm_grouped_grouped() -> None:
    """One launch however many experts have rows, where naive has one for each; the grid is bounded by the shapes."""
    for case, used in zip(ops()["gemm_grouped"].cases["smoke"], (4, 6), strict=True):
        assert calls("gemm_grouped", "naive", case).names["mm"] == used
    info = grouped("grouped")
    assert info.grid[0] == (4096 // 128 + 8) * (28672 // 256)
    inner = loop(info).counts
    assert inner["wgmma"] == 4 and inner["cp_async"] > 0 and inner["global_load"] == inner["global_store"] == 0
    assert info.stack_bytes == 0 and not grouped("grouped", "fp32").uses_tf32


@rung("gemm_grouped/tma")
def gemm_grouped_tma() -> None:
    """Two instructions fetch a tile, of whichever expert."""
    fetched_by_tma(grouped("grouped"), grouped("tma"))


@rung("gemm_grouped/cooperative")
def gemm_grouped_cooperative() -> None:
    """As many CTAs as SMs, one warp loading and two warpgroups multiplying; whole tiles leave by TMA, others do not."""
    below, info = grouped("tma"), grouped("cooperative")
    assert below.grid[0] > 132 == info.grid[0] and loop(info).counts["wgmma"] == 4
    specialized(below, info)
    assert "cp.async.bulk.tensor.2d.global.shared" in info.ptx and info.counts["global_store"] > 0


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


@rung("gemm_w8a16/gemv", slow=True)
def gemm_w8a16_gemv() -> None:
    """One launch for naive's four; 2.1 instructions of a thread for each weight, all in registers, in one wave."""
    assert calls("gemm_w8a16", "naive").names.total() >= 4
    info = code("gemm_w8a16", "gemv", "w8a16", SQUARE8.format(1))
    is_a_stream(info, 2.5)
    is_a_stream(code("gemm_w8a16", "gemv", "w8a16", SQUARE8.format(8)), 2.5)


@rung("gemm_w8a16/dequant_dot", slow=True)
def gemm_w8a16_dequant_dot() -> None:
    """wgmma from registers, and no int8 is converted by an instruction that does one at a time."""
    info = code("gemm_w8a16", "dequant_dot", "w8a16", SQUARE8.replace("N=8192", "N=28672").format(64))
    is_fed_from_registers(info)
    assert not any(instruction.opcode.startswith("I2F") for instruction in loop(info).instructions)


@rung("gemm_w8a16/packed")
def gemm_w8a16_packed() -> None:
    """Many rows meet a block of channels after another, in bf16; few go the library's way."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return  # the kernel refuses such a CPU
    many, few = (calls("gemm_w8a16", "packed", Case(M=M, N=256, K=4096, bias=False)).names for M in (64, 4))
    products = [sum(names[name] for name in names if "_linear_pointwise" in name) for names in (many, few)]
    assert products == [2, 0] and (many["_weight_int8pack_mm"], few["_weight_int8pack_mm"]) == (0, 1)


@rung("gemm_w4a16/gemv", slow=True)
def gemm_w4a16_gemv() -> None:
    """One launch for naive's nine or so; 2 instructions of a thread for each weight, all in registers, in one wave,
    whatever the group: in groups of 32 the mma's spare columns keep the groups apart."""
    assert calls("gemm_w4a16", "naive").names.total() >= 8
    for scheme in ("w4a16_g128", "w4a16_g64", "w4a16_g32"):
        for zeros in ("false", "true"):
            is_a_stream(code("gemm_w4a16", "gemv", scheme, SQUARE4.format(1, zeros)), 2.2)
    one, four = (loop(code("gemm_w4a16", "gemv", "w4a16_g128", SQUARE4.format(M, "false"))) for M in (1, 4))
    assert one.counts["mma"] == four.counts["mma"], "rows of a up to eight are columns of the same mma"


@rung("gemm_w4a16/dequant_dot", slow=True)
def gemm_w4a16_dequant_dot() -> None:
    """wgmma from registers in every group, with one fp32 multiply-add for each sum of a group."""
    for scheme in ("w4a16_g128", "w4a16_g64", "w4a16_g32"):
        wide = SQUARE4.replace("N=8192", "N=28672").format(64, "false")
        is_fed_from_registers(code("gemm_w4a16", "dequant_dot", scheme, wide))
