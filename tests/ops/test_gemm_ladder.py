"""The Triton rungs of gemm: the data that passes through shared memory beside the stages."""

from __future__ import annotations

import pytest
from compiled_sizes import compiled
from op_kernels import slow

from rooflab.bench.compile.cases import KernelCase
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.occupancy import HOPPER


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "M", "scheme"),
    [
        ("persistent", 4096, "bf16"),
        ("stream_k", 32, "bf16"),
        slow("persistent", 4096, "tf32"),
        slow("warp_specialized", 4096, "bf16"),
    ],
)
def test_what_is_legal_fits_with_both_addends(name: str, M: int, scheme: str) -> None:
    """A residual, and a tile on its way to partial sums, pass through shared memory beside the stages: in the heuristic
    and in the legal config nearest to what an SM has."""
    kernel, of = get_kernel("gemm", name), SCHEMES[scheme]
    case = Case(M=M, N=4096, K=4096, layout="NT", bias=True, residual=True)
    said = lambda config: kernel.tuning.footprint(config, case, of).shared_bytes
    largest = max((c for c in kernel.tunable.legal_configs(case, of) if getattr(c, "group_m", 8) == 8), key=said)
    configs = (kernel.tuning.heuristic(case, of), largest)
    for request, info in compiled([KernelCase("gemm", name, case, of, config=config) for config in configs]):
        assert info.shared_bytes <= HOPPER.shared_bytes_per_cta, info.asked
        assert name == "warp_specialized" or info.shared_bytes <= said(request.config)
