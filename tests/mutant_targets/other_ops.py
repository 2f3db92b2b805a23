"""Normalisation and sampling."""

from __future__ import annotations

from mutant_targets.target import Target

TARGETS = {
    "rmsnorm": Target("rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"block_t": 1, "num_warps": 4}),
    "fused_add_rmsnorm": Target(
        "fused_add_rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"block_t": 1, "num_warps": 4}
    ),
    "sample": Target(
        "sample", "bisect",
        ("B=2,V=1200,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02",
         "B=1,V=1200,temperature=0.8,top_k=0,top_p=0.9,min_p=0.0"),
        {"block": 512, "search_block": 256, "num_warps": 4},
    ),
}  # fmt: skip
