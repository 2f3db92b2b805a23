"""The ladder of gemm_fp8: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

import re

from rung_claims import calls, code, loop, rung

from rooflab.bench.compile.static import CompiledInfo

CASE = "M=2048,N=28672,K=4096,scales=tensor,bias=false,fast_accum=true"
BLOCKS = "M=2048,N=28672,K=4096,scales=block,bias=false"


def compiled(name: str, case: str = CASE) -> CompiledInfo:
    return code("gemm_fp8", name, "fp8_e4m3", case)


def new_sums(info: CompiledInfo) -> tuple[int, int]:
    """wgmma that begin a sum, and all of them."""
    found = re.findall(r"QGMMA\.\S+ R\d+, gdesc\[UR\d+\], (\w+)", info.sass)
    return found.count("RZ"), len(found)


def added(info: CompiledInfo, opcode: str) -> int:
    return sum(instruction.opcode.split(".")[0] == opcode for instruction in loop(info).instructions)


@rung("gemm_fp8/fast_accum")
def fast_accum() -> None:
    """One launch in place of torch's steps; wgmma fed by TMA, whose sums nothing else touches in the loop."""
    assert calls("gemm_fp8", "naive").names.total() >= 6
    info = compiled("fast_accum")
    counts = loop(info).counts
    assert counts["wgmma"] == 4 and counts["tma"] == 2 and counts["fma"] == 0 and not info.spill_stores
    assert added(info, "FADD") == 0 and new_sums(info)[0] == 0


@rung("gemm_fp8/promoted")
def promoted() -> None:
    """Every fourth wgmma, of 32 of K each, begins a new sum, and every accumulator is added up once for it."""
    for case, opcode in ((CASE, "FADD"), (BLOCKS, "FFMA")):
        info = compiled("promoted", case)
        assert loop(info).counts["wgmma"] == 4 and loop(info).counts["tma"] == 2 and not info.spill_stores
        assert new_sums(info) == (1, 4)
        assert added(info, opcode) == 128 * 128 // info.threads


@rung("gemm_fp8/promoted_ws")
def promoted_ws() -> None:
    """Consumers' loops load no tile, the producer's multiplies nothing; a grid of one wave; nothing spills."""
    for case, opcode in ((CASE, "FADD"), (BLOCKS, "FFMA")):
        info = compiled("promoted_ws", case)
        assert info.uses_warp_specialization and info.threads == 3 * 128 and info.grid[0] == 132
        assert not info.spill_stores and new_sums(info) == (2, 8)
        assert loop(info).counts["wgmma"] == 4 and loop(info).counts["tma"] == 0
        assert added(info, opcode) == 64 * 128 // 128
        assert any(each.counts["tma"] == 3 and not each.counts["wgmma"] for each in info.loops)
