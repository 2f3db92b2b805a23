"""The ladder of gemm: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

import re
from dataclasses import replace

from compiled import compile_kernel
from rung_claims import code, fetched_by_tma, loop, one_loop_on_all_sms, rung, specialized

from rooflab.bench.compile.static import CompiledInfo
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

SQUARE = Case(M=16, N=4096, K=4096, layout="NT", bias=False)
"""Llama-3-8B's o: of its shapes the one with the fewest tiles for its bytes."""


def compiled(name: str, case: Case = SQUARE) -> list[CompiledInfo]:
    """What a rung launches in bf16."""
    return compile_kernel("gemm", name, case, SCHEMES["bf16"])


@rung("gemm/one_thread")
def gemm_one_thread() -> None:
    """Each FMA has two loads of its own; nothing is shared."""
    counts = loop(code("gemm", "one_thread")).counts
    assert counts["fma"] > 0 and counts["global_load"] == 2 * counts["fma"]
    assert counts["shared_load"] == counts["shared_store"] == counts["barrier"] == counts["wgmma"] == 0


@rung("gemm/shared_tiles", slow=True)
def gemm_shared_tiles() -> None:
    """Loads go to shared memory, one barrier a step; 64 FMAs for four reads of it, and no spills."""
    for scheme in ("bf16", "fp32"):
        info = code("gemm", "shared_tiles", scheme)
        counts = loop(info).counts
        assert counts["barrier"] == 1 and counts["shared_store"] > 0 and not info.uses_tensor_cores
        assert counts["fma"] == 16 * counts["shared_load"], "8 x 8 products of two and two reads of four"
        assert counts["fma"] >= 40 * counts["global_load"] and info.stack_bytes == 0


@rung("gemm/cooperative")
def gemm_cooperative() -> None:
    """Each consumer keeps a product in flight through its loop, where those below wait for every one."""
    below, info = code("gemm", "warp_specialized"), code("gemm", "cooperative")
    pending = r"wgmma\.wait_group\.sync\.aligned (\d)"
    assert set(re.findall(pending, below.ptx)) == {"0"}
    assert sorted(re.findall(pending, info.ptx)) == ["0", "0", "1", "1"], "in each consumer's loop, and after it"
    counts = loop(info).counts
    assert counts["wgmma"] > 0 and counts["global_load"] == counts["shared_load"] == counts["spill_load"] == 0
    assert info.threads == 384 and info.stack_bytes == 0 and "setmaxnreg" in info.ptx
    assert len([found for found in info.loops if found.innermost and found.counts["wgmma"]]) == 2


@rung("gemm/multicast")
def gemm_multicast() -> None:
    """Half of the copies of a step go to both CTAs of the cluster; one loop serves both consumers."""
    info = code("gemm", "multicast")
    (inner,) = [found for found in info.loops if found.innermost and found.counts["wgmma"]]
    assert inner.counts["wgmma"] == 4 and inner.counts["global_load"] == inner.counts["spill_load"] == 0
    assert info.opcodes["UTMALDG.2D"] == info.opcodes["UTMALDG.2D.MULTICAST"] == 2
    assert info.threads == 384 and info.stack_bytes == 0 and info.ctas % 2 == 0
    assert "UTMALDG.2D.MULTICAST" not in code("gemm", "cooperative").opcodes


@rung("gemm/tensor_core", slow=True)
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


@rung("gemm/tma", slow=True)
def gemm_tma() -> None:
    """Two instructions fetch a tile in each layout, and wgmma takes it as it lies."""
    fetched_by_tma(code("gemm", "pipelined"), code("gemm", "tma"))
    for layout in ("NN", "NT", "TN"):
        counts = loop(code("gemm", "tma", case=f"M=512,N=512,K=512,layout={layout},bias=false")).counts
        assert counts["tma"] == 2 and counts["wgmma"] > 0, layout
        assert counts["shared_load"] == counts["shared_store"] == 0, f"{layout}: transposed on the way"
    assert loop(code("gemm", "tma", "tf32")).counts["wgmma"] > 0


@rung("gemm/persistent")
def gemm_persistent() -> None:
    """As many CTAs as SMs, in one loop; a tile leaves in four parts."""
    info = code("gemm", "persistent")
    one_loop_on_all_sms(code("gemm", "tma"), info, stores=4)
    assert info.counts["global_store"] == 0


@rung("gemm/warp_specialized")
def gemm_warp_specialized() -> None:
    """One warpgroup loads, two multiply; with 8 warps Triton ignores what is asked."""
    specialized(code("gemm", "persistent"), code("gemm", "warp_specialized"))
    kernel = get_kernel("gemm", "warp_specialized")
    case = Case(M=512, N=512, K=512, layout="NT", bias=False)
    eight = replace(kernel.tuning.heuristic(case), num_warps=8)
    assert not kernel.tuning.is_legal(eight, case)
    (ignored,) = compile_kernel("gemm", "warp_specialized", case, SCHEMES["bf16"], config=eight)
    assert ignored.threads == 256 and "setmaxnreg" not in ignored.ptx


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


@rung("gemm/split_k", slow=True)
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


@rung("gemm/stream_k", slow=True)
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


@rung("gemm/swap_ab", slow=True)
def gemm_swap_ab() -> None:
    """wgmma, with the batch as its 8 to 64 columns, where split_k has mma.sync up to 32 rows and then 64 rows; those
    that load and those that multiply are different warps; one launch, with its sums in a cluster."""
    for M, n in ((1, 8), (8, 8), (16, 16), (32, 32), (64, 64)):
        (info,) = compiled("swap_ab", SQUARE.but(M=M))
        products = {opcode.split(".")[1] for opcode in info.opcodes if opcode.startswith("HGMMA")}
        assert products == {f"64x{n}x16"} and info.launches == 1 and info.stack_bytes == 0
        assert HOPPER_SMS - 8 <= info.ctas and any(opcode.startswith("UCGABAR") for opcode in info.opcodes)
    below = compiled("split_k")[0]
    assert below.counts["mma"] > 0 and not below.counts["wgmma"]
    (multiplying,) = [found for found in info.loops if found.counts["wgmma"]]
    assert multiplying.counts["cp_async"] == multiplying.counts["global_load"] == 0
    assert any(found.counts["cp_async"] for found in info.loops)
