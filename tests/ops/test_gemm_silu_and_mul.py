"""gemm_silu_and_mul: CTAs with several tiles."""

from __future__ import annotations

import pytest
from op_kernels import slow

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.emulate.calls import call
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case

RING = {"block_m": 128, "block_i": 64, "block_k": 64, "stages": 6, "group_m": 16}


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "K", "scheme", "config"),
    [slow("persistent", 136, "bf16", None), slow("cooperative", 136, "bf16", None), ("cooperative", 264, "fp16", RING)],
)
def test_a_cta_walks_over_several_tiles(name, K, scheme, config) -> None:
    """More tiles than CTAs, of which the first and the last run: values, and no race from one tile to the next."""
    kernel, case = get_kernel("gemm_silu_and_mul", name), Case(M=256, I=8704, K=K, layout="NT")
    chosen = kernel.tuning.config_type(**config) if config else None
    answer = call(KernelCase("gemm_silu_and_mul", name, case, SCHEMES[scheme], None, chosen), sample=0).answer
    assert answer["status"] == "OK" and answer["of"] == 132, answer
