"""The rungs of gemm in CUDA C++ and Gluon: what their compiled code shows over the rung below."""

from __future__ import annotations

import re

from rung_claims import code, loop, rung


@rung("gemm/one_thread")
def gemm_one_thread() -> None:
    """Each FMA has two loads of its own; nothing is shared."""
    counts = loop(code("gemm", "one_thread")).counts
    assert counts["fma"] > 0 and counts["global_load"] == 2 * counts["fma"]
    assert counts["shared_load"] == counts["shared_store"] == counts["barrier"] == counts["wgmma"] == 0


@rung("gemm/shared_tiles")
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
