"""The ladders of gemm_silu_and_mul and gemm_grouped: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

from rung_claims import calls, code, loop, rung

from rooflab.bench.compile.sass import parse
from rooflab.bench.compile.static import CompiledInfo
from rooflab.kernels.registry import ops

PREFILL = "M=2048,I=14336,K=4096,layout=NT"
MIXTRAL = "T=4096,top_k=2,E=8,N=28672,K=4096,skew=0.0"


def gated(name: str, scheme: str = "bf16") -> CompiledInfo:
    return code("gemm_silu_and_mul", name, scheme, PREFILL)


def grouped(name: str, scheme: str = "bf16") -> CompiledInfo:
    return code("gemm_grouped", name, scheme, MIXTRAL)


def global_stores(info: CompiledInfo) -> int:
    found = parse(info.sass)[info.name].instructions
    return sum(instruction.family == "global_store" for instruction in found)


@rung("gemm_silu_and_mul/fused")
def gemm_silu_and_mul_fused() -> None:
    """One launch for library's three calls: exp stands behind the products' loop, and half as much is stored."""
    assert calls("gemm_silu_and_mul", "library").names.total() == 3
    info = gated("fused")
    inner = loop(info).counts
    assert inner["wgmma"] == 4 and inner["cp_async"] > 0 and inner["global_load"] == inner["special_function"] == 0
    assert "m64n256k16" in info.ptx, "gate and up are one operand"
    outputs = 128 * 128 * 2 // (16 * info.threads)
    assert info.opcodes["STG.E.128"] == global_stores(info) == outputs
    assert info.stack_bytes == 0 and not gated("fused", "fp32").uses_tf32


@rung("gemm_silu_and_mul/tma")
def gemm_silu_and_mul_tma() -> None:
    """Two instructions fetch a tile, both halves of B in one box, and the result leaves by TMA."""
    below, info = loop(gated("fused")).counts, loop(gated("tma")).counts
    assert below["tma"] == 0 and below["cp_async"] >= 8
    assert info["tma"] == 2 and info["wgmma"] == below["wgmma"] and info["cp_async"] == 0
    assert info["shared_load"] == info["shared_store"] == 0, "wgmma takes the box as it lies"
    assert global_stores(gated("tma")) == 0 and gated("tma").stack_bytes == 0


@rung("gemm_silu_and_mul/persistent")
def gemm_silu_and_mul_persistent() -> None:
    """As many CTAs as SMs; one loop holds loads, products, the activation and the stores."""
    below, info = gated("tma"), gated("persistent")
    assert below.grid[0] > 132 == info.grid[0]
    assert len([found for found in info.loops if not found.waits]) == 1, "both loops are one"
    assert loop(info).counts["tma"] == loop(below).counts["tma"] + 1 and loop(info).counts["wgmma"] > 0
    assert info.stack_bytes == 0


@rung("gemm_silu_and_mul/cooperative")
def gemm_silu_and_mul_cooperative() -> None:
    """A warp loads and two warpgroups multiply, each 64 rows by 256 columns; registers move between them."""
    below, info = gated("persistent"), gated("cooperative")
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert info.threads == 384 and "setmaxnreg" in info.ptx and "m64n256k16" in info.ptx
    inner = loop(info).counts
    assert inner["wgmma"] == 4 and inner["tma"] == inner["shared_load"] == inner["shared_store"] == 0
    assert global_stores(info) == info.stack_bytes == 0


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
    below, info = loop(grouped("grouped")).counts, loop(grouped("tma")).counts
    assert below["tma"] == 0 and below["cp_async"] >= 8
    assert info["tma"] == 2 and info["wgmma"] == below["wgmma"] and info["cp_async"] == 0
    assert info["shared_load"] == info["shared_store"] == 0, "wgmma takes the box as it lies"
    assert grouped("tma").stack_bytes == 0


@rung("gemm_grouped/cooperative")
def gemm_grouped_cooperative() -> None:
    """As many CTAs as SMs, one warp loading and two warpgroups multiplying; whole tiles leave by TMA, others do not."""
    below, info = grouped("tma"), grouped("cooperative")
    assert below.grid[0] > 132 == info.grid[0]
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert info.threads == 384 and "setmaxnreg" in info.ptx
    inner = loop(info).counts
    assert inner["wgmma"] == 4 and inner["tma"] == inner["shared_load"] == inner["shared_store"] == 0
    assert "cp.async.bulk.tensor.2d.global.shared" in info.ptx and global_stores(info) > 0
    assert info.stack_bytes == 0
