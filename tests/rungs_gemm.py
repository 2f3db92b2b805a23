"""The ladder of gemm: what each rung's compiled code shows over the rung below."""

from __future__ import annotations

from rung_claims import code, loop, rung


@rung("gemm/tensor_core")
def gemm_tensor_core() -> None:
    """Products move from FMAs to wgmma, fed by cp.async; in fp32 they stay FMAs, with far fewer loads for each."""
    naive, info = loop(code("gemm", "naive")).counts, loop(code("gemm", "tensor_core")).counts
    assert naive["fma"] > 0 and naive["wgmma"] == naive["mma"] == naive["cp_async"] == 0
    assert info["wgmma"] > 0 and info["cp_async"] > 0 and info["fma"] == 0 and info["global_load"] == 0
    naive32, full = loop(code("gemm", "naive", "fp32")), code("gemm", "tensor_core", "fp32")
    assert not full.uses_tensor_cores and not full.uses_tf32
    reuse = loop(full).counts["fma"] / loop(full).global_loads
    assert reuse >= 10 * naive32.counts["fma"] / naive32.global_loads
