"""Attention through a block table."""

from __future__ import annotations

from mutant_targets.target import Target

TARGETS: dict[str, Target] = {
    # Three shares of 7 units: each has a part of a sequence, and one a whole one.
    "paged_split_kv": Target(
        "paged_attention", "split_kv", ("B=2,context=100,H=4,H_kv=2,D=64,block_size=16,ragged=true,lse=true",),
        {"warps": 2, "num_stages": 3, "ctas_per_sm": 1, "least": 3},
        ("0: drop cp.async.wait_group 1", "0: one more pending in cp.async.wait_group 1"),
    ),
}  # fmt: skip
