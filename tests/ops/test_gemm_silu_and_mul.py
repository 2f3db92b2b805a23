"""gemm_silu_and_mul: refusals, cost, and CTAs with several tiles."""

from __future__ import annotations

import pytest
import torch
from op_kernels import META, each, slow

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.emulate.calls import call
from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.gemm_silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case

TMA = [kernel for kernel in kernels("gemm_silu_and_mul").values() if kernel.min_sm == 90]


def weight(K: int, I: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2 * I, K, dtype=dtype).mT


@each(TMA)
def test_tma_names_the_rung_that_takes_what_it_cannot(kernel: Kernel) -> None:
    instead = "gemm_silu_and_mul/fused takes it"
    a, b = torch.ones(16, 64, dtype=torch.bfloat16), weight(64, 32, torch.bfloat16)
    assert kernel.why_not_args({"a": a, "b": b}) is None
    for change in (
        {"b": b.contiguous()},
        {"a": torch.ones(64, 16, dtype=torch.bfloat16).mT},
        {"a": torch.ones(16, 68, dtype=torch.bfloat16)[:, 4:]},
        {"b": torch.ones(64, 68, dtype=torch.bfloat16)[:, :64].mT},
        {"b": weight(64, 33, torch.bfloat16)},
    ):
        assert instead in str(kernel.why_not_args({"a": a, "b": b, **change}))
        with pytest.raises(ValueError, match=instead):
            kernel.fn(**{"a": a, "b": b, **change})
    wide = torch.ones(16, 36, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out: expected an address "):
        kernel.fn(a=a, b=b, out=wide[:, 4:])


def test_fp32_is_for_another_rung_than_cooperative() -> None:
    kernel = get_kernel("gemm_silu_and_mul", "cooperative")
    reason = kernel.why_not_args({"a": torch.ones(16, 64), "b": weight(64, 32)}).reason
    assert " takes it" in str(reason)


def test_cost_and_traffic() -> None:
    """The fused rungs move what must move; the library's calls write the product, and read it back."""
    inputs = SPEC.make_inputs(Case(M=2048, I=14336, K=4096, layout="NT"), SCHEMES["bf16"], META, 0)
    cost, outputs = SPEC.cost_of(inputs), 2048 * 14336
    assert cost.tensor_flops == {"bf16": 4 * outputs * 4096} and cost.sfu_ops == 2 * outputs
    assert cost.read_bytes == 2 * 4096 * (2048 + 2 * 14336) and cost.write_bytes == 2 * outputs
    library = get_kernel("gemm_silu_and_mul", "library").traffic_of(inputs)
    assert library.launches == 3 and library.bytes - cost.bytes == 2 * (2 + 1 + 1 + 2) * outputs
    assert get_kernel("gemm_silu_and_mul", "cooperative").traffic_of(inputs).bytes == cost.bytes


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
