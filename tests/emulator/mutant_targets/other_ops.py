"""Kernels of normalisation, softmax, sampling and verification."""

from __future__ import annotations

from mutant_targets.target import Target


def _cluster(op: str, rows: int, case: str, scheme: str = "bf16") -> dict[str, Target]:
    """On one SM three clusters of two CTAs for all rows.

    A CTA that does not wait for the others at the end meets, in these cases, one that still reads its sums.
    """
    config = {"lanes": 128, "vectors": 1, "rows": 1, "cluster": 2, "persistent": True}
    options = (("sms", 1), ("scheme", scheme))
    return {f"{op}_cluster": Target(op, "cluster", (f"T={rows},H=2000{case}",), config, (), options)}


TARGETS = {
    "rmsnorm": Target("rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"block_t": 1, "num_warps": 4}),
    "fused_add_rmsnorm": Target(
        "fused_add_rmsnorm", "fused", ("T=3,H=1000,eps=1e-05",), {"block_t": 1, "num_warps": 4}
    ),
    "layernorm": Target("layernorm", "fused", ("T=3,H=1000,bias=true,eps=1e-05",), {"block_t": 1, "num_warps": 4}),
    "softmax": Target("softmax", "fused", ("T=3,H=1000",), {"block_t": 1, "num_warps": 4}),
    **_cluster("rmsnorm", 10, ",eps=1e-05", "out_fp8"),
    **_cluster("fused_add_rmsnorm", 16, ",eps=1e-05", "out_int8"),
    **_cluster("layernorm", 10, ",bias=true,eps=1e-05"),
    **_cluster("softmax", 10, ""),
    "verify": Target("speculative_verify", "fused", ("B=6,K=3,V=5000",), options=(("scheme", "fp32"),)),
    "sample": Target(
        "sample",
        "bisect",
        (
            "B=2,V=1200,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02",
            "B=1,V=1200,temperature=0.8,top_k=0,top_p=0.9,min_p=0.0",
        ),
    ),
    # The second case's 152 groups of four are more than threads; in the third one CTA ends ahead of the other.
    "sample_cluster": Target(
        "sample",
        "cluster",
        (
            "B=1,V=1200,temperature=0.8,top_k=40,top_p=0.9,min_p=0.02",
            "B=1,V=1200,temperature=0.8,top_k=0,top_p=0.9,min_p=0.0",
            "B=1,V=1300,temperature=0.8,top_k=0,top_p=0.5,min_p=0.0",
        ),
        {"cluster": 2, "threads": 128},
    ),
}
