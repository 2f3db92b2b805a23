"""Attention, normalisation and sampling."""

from __future__ import annotations

from collections.abc import Sequence

from mutant_targets.target import Target


def _flash(m: int, n: int, warps: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_m": m, "block_n": n, "num_warps": warps, "num_stages": 3}
    return Target(
        "flash_attention", "online", (f"B=1,T={m},S={5 * n},H=1,H_kv=1,D=64,causal=false",), config, tuple(quick)
    )


def _paged(block_n: int, stages: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_n": block_n, "num_warps": 4, "num_stages": stages}
    case = "B=2,context=400,H=4,H_kv=2,D=64,block_size=16,ragged=true"
    return Target("paged_attention", "gqa_packed", (case,), config, tuple(quick))


TARGETS = {
    "flash_wgmma": _flash(128, 64, 8, ["drop wgmma.wait_group 2", "drop wgmma.fence 2", "drop bar.sync 3"]),
    "flash_mma": _flash(32, 32, 4),
    "paged_3_stages": _paged(64, 3),
    "paged_5_stages": _paged(32, 5, [
        "drop cp.async.wait_group 1", "one more pending in cp.async.wait_group 3", "drop cp.async.commit_group 6",
        "drop bar.sync 4",
    ]),
    "rmsnorm": Target("rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"num_warps": 4}),
    "fused_add_rmsnorm": Target("fused_add_rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"num_warps": 4}),
    "sample": Target(
        "sample", "bisect",
        ("B=2,V=1200,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02",
         "B=1,V=1200,temperature=0.8,top_k=0,top_p=0.9,min_p=0.0"),
        {"block": 512, "search_block": 256, "num_warps": 4},
    ),
}  # fmt: skip
