"""The ladder of gemm: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

from dataclasses import replace

from rung_claims import code, loop, rung

from rooflab.bench.compile.sass import parse
from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case


@rung("gemm/tensor_core")
def gemm_tensor_core() -> None:
    """Products move from FMAs to wgmma; tiles pass through registers. In fp32 they stay FMAs, far fewer loads each."""
    naive, info = loop(code("gemm", "naive")).counts, loop(code("gemm", "tensor_core")).counts
    assert naive["fma"] > 0 and naive["wgmma"] == naive["mma"] == 0
    assert info["wgmma"] > 0 and info["fma"] == 0
    assert info["global_load"] > 0 and info["shared_store"] > 0 and info["cp_async"] == 0
    naive32, full = loop(code("gemm", "naive", "fp32")), code("gemm", "tensor_core", "fp32")
    assert not full.uses_tensor_cores and not full.uses_tf32
    reuse = loop(full).counts["fma"] / loop(full).global_loads
    assert reuse >= 10 * naive32.counts["fma"] / naive32.global_loads
    assert loop(code("gemm", "tensor_core", "tf32")).counts["wgmma"] > 0


@rung("gemm/pipelined")
def gemm_pipelined() -> None:
    """The same products, and cp.async in the place of every load and its store; more than two stages are held."""
    below, info = code("gemm", "tensor_core"), code("gemm", "pipelined")
    assert loop(info).counts["wgmma"] == loop(below).counts["wgmma"]
    assert loop(info).counts["cp_async"] == loop(below).counts["global_load"]
    assert loop(info).counts["global_load"] == loop(info).counts["shared_store"] == 0
    assert info.shared_bytes >= 3 * below.shared_bytes
    assert loop(code("gemm", "pipelined", "fp32")).counts["cp_async"] > 0


@rung("gemm/tma")
def gemm_tma() -> None:
    """Two instructions fetch what took every thread eight, in each layout, and wgmma takes the tiles as they lie."""
    below, info = loop(code("gemm", "pipelined")).counts, loop(code("gemm", "tma")).counts
    assert below["tma"] == 0 and below["cp_async"] >= 8
    assert info["tma"] == 2 and info["wgmma"] > 0 and info["cp_async"] == 0
    for layout in ("NN", "NT", "TN"):
        found = code("gemm", "tma", case=f"M=512,N=512,K=512,layout={layout},bias=false")
        counts = loop(found).counts
        assert counts["tma"] == 2 and counts["wgmma"] > 0, layout
        assert counts["shared_load"] == counts["shared_store"] == 0, f"{layout}: transposed on the way"
    assert loop(code("gemm", "tma", "tf32")).counts["wgmma"] > 0


@rung("gemm/persistent")
def gemm_persistent() -> None:
    """As many CTAs as SMs; one loop holds loads, products and the stores of the result, which are TMA's as well."""
    below, info = code("gemm", "tma"), code("gemm", "persistent")
    assert below.grid[0] > 132 == info.grid[0]
    assert len([found for found in info.loops if not found.waits]) == 1, "both loops are one"
    counts = loop(info).counts
    assert counts["wgmma"] > 0 and counts["tma"] == loop(below).counts["tma"] + 4, "four parts of a tile"
    whole = parse(info.sass)[info.name].instructions
    assert not [instruction for instruction in whole if instruction.family == "global_store"]
    assert info.stack_bytes == 0


@rung("gemm/warp_specialized")
def gemm_warp_specialized() -> None:
    """One warpgroup loads, two multiply and registers move between them; with 8 warps Triton ignores what is asked."""
    below, info = code("gemm", "persistent"), code("gemm", "warp_specialized")
    assert not below.uses_warp_specialization and info.uses_warp_specialization
    assert info.threads == 384 and "setmaxnreg" in info.ptx
    assert loop(info).counts["wgmma"] > 0 and loop(info).counts["tma"] == 0, "the products' loop only waits"
    assert info.stack_bytes == 0
    kernel = get_kernel("gemm", "warp_specialized")
    case = Case(M=512, N=512, K=512, layout="NT", bias=False)
    eight = replace(kernel.tuning.heuristic(case), num_warps=8)
    assert not kernel.tuning.is_legal(eight, case)
    (ignored,) = compile_kernels([Request("gemm", "warp_specialized", case, SCHEMES["bf16"], config=eight)])
    assert not isinstance(ignored, CompileFailure)
    assert ignored[0].threads == 256 and "setmaxnreg" not in ignored[0].ptx
