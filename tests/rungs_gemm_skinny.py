"""gemm's ladder for few rows of a: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

from rung_claims import code, loop, rung

from rooflab.bench.compile.flow import Loop
from rooflab.bench.compile.static import CompiledInfo, compile_kernel
from rooflab.kernels._device import HOPPER_SMS
from rooflab.reference.spec import SCHEMES, Case

SQUARE = Case(M=16, N=4096, K=4096, layout="NT", bias=False)
"""Llama-3-8B's o: of its shapes the one with the fewest tiles for its bytes."""


def compiled(name: str, case: Case = SQUARE) -> list[CompiledInfo]:
    """What a rung launches in bf16."""
    return compile_kernel("gemm", name, case, SCHEMES["bf16"])


def loops_with(info: CompiledInfo, family: str) -> list[Loop]:
    """The loops that have instructions of a family: code with warps of two kinds has no single hot loop."""
    return [found for found in info.loops if found.counts[family]]


@rung("gemm/gemv")
def gemm_gemv() -> None:
    """16 bytes a load where naive loads an element, eight of them before one is used; FMAs alone, and no tile in shared
    memory."""
    naive, info = code("gemm", "naive"), code("gemm", "gemv", "bf16", SQUARE.but(M=1).id)
    weights = [opcode for opcode in info.opcodes if ".NA." in opcode]
    assert weights and all("LDG" in opcode and ".128" in opcode for opcode in weights)
    assert not any("LDG" in opcode and ".128" in opcode for opcode in naive.opcodes)
    assert not info.uses_tensor_cores and loop(info).counts["fma"] > 0
    assert loop(info).counts["shared_load"] == loop(info).counts["global_store"] == info.stack_bytes == 0
    first = [item.family for item in loop(info).instructions if item.family in ("global_load", "fma")].index("fma")
    assert first >= 8


@rung("gemm/split_k")
def gemm_split_k() -> None:
    """More CTAs than tiles, enough for the SMs, and a launch that adds their sums up; pipelined has a CTA a tile."""
    below, (main, reduction) = code("gemm", "pipelined", "bf16", SQUARE.id), compiled("split_k")
    tiles, split = main.grid
    assert split > 1 and below.ctas == tiles == 64 < 3 * HOPPER_SMS // 4 <= tiles * split
    assert loop(main).counts["cp_async"] > 0 and loop(main).counts["mma"] > 0
    assert reduction.counts["global_load"] == split and reduction.counts["atomic"] == main.counts["atomic"] == 0
    assert main.stack_bytes == 0
    (whole,) = compiled("split_k", SQUARE.but(N=28672))
    assert whole.grid[1] == 1, "where the tiles fill the SMs it is one launch"


@rung("gemm/stream_k")
def gemm_stream_k() -> None:
    """A CTA for each SM whatever the number of tiles, where split_k's are a multiple of it; one loop runs through tiles
    and steps of K, with the stores of a tile inside."""
    for N in (4096, 6144, 28672):
        main, _ = compiled("stream_k", SQUARE.but(N=N))
        assert main.ctas == HOPPER_SMS and main.stack_bytes == 0
        assert compiled("split_k", SQUARE.but(N=N))[0].ctas % HOPPER_SMS != 0
    inner = loop(main).counts
    assert inner["mma"] > 0 and inner["cp_async"] > 0 and inner["global_store"] > 0
    assert loop(compiled("split_k")[0]).counts["global_store"] == 0


@rung("gemm/swap_ab")
def gemm_swap_ab() -> None:
    """wgmma, with the batch as its 8 to 64 columns, where split_k has mma.sync up to 32 rows and then 64 rows; those
    that load and those that multiply are different warps; one launch, with its sums in a cluster."""
    for M, n in ((1, 8), (8, 8), (16, 16), (32, 32), (64, 64)):
        (info,) = compiled("swap_ab", SQUARE.but(M=M))
        products = {opcode.split(".")[1] for opcode in info.opcodes if opcode.startswith("HGMMA")}
        assert products == {f"64x{n}x16"} and info.launches == 1 and info.stack_bytes == 0
        assert HOPPER_SMS - 8 <= info.ctas and any(opcode.startswith("UCGABAR") for opcode in info.opcodes)
    below = compiled("split_k")[0]
    assert below.counts["mma"] > 0 and not below.uses_wgmma
    (multiplying,) = loops_with(info, "wgmma")
    assert multiplying.counts["cp_async"] == multiplying.counts["global_load"] == 0
    assert any(found.counts["cp_async"] for found in info.loops)
