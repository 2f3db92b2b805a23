"""Dense products."""

from __future__ import annotations

from collections.abc import Sequence

from mutant_targets.target import BARRIERS, Target


def _gemm(m: int, n: int, warps: int, quick: Sequence[str] = ()) -> Target:
    config = {"block_m": m, "block_n": n, "block_k": 64, "num_warps": warps, "num_stages": 3, "group_m": 8}
    return Target("gemm", "pipelined", (f"M={m},N={n},K=320,layout=NN,bias=true",), config, tuple(quick))


TARGETS = {
    "gemm_cooperative": Target(
        "gemm", "cooperative", ("M=136,N=72,K=200,layout=NT,bias=true,residual=true",),
        {"block_m": 128, "block_n": 64, "block_k": 64, "stages": 3, "group_m": 2, "store_n": 32, "lead": 1},
        ("drop mbarrier.arrive 2", "one more pending in wgmma.wait_group 2", "drop fence.proxy.async 3",
         "drop cp.async.bulk.wait_group 1"), (("sms", 1), ("without", BARRIERS)),
    ),
    "gemm_naive": Target("gemm", "naive", ("M=16,N=32,K=100,layout=NN,bias=true",)),
    "gemm_wgmma": _gemm(128, 128, 8, [
        "drop wgmma.fence 1", "drop wgmma.commit_group 1", "one more pending in wgmma.wait_group 1",
        "drop fence.proxy.async 1", "drop bar.sync 2", "drop bar.sync 3",
    ]),
    "gemm_mma": _gemm(32, 64, 4),
}  # fmt: skip
