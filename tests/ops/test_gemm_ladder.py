"""The Triton rungs of gemm: shared memory and registers, legal tiles, and a CTA's second tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled_sizes import compiled
from op_kernels import slow
from triton.runtime import _allocation

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.flow import hot_loop
from rooflab.bench.emulate.calls import call
from rooflab.kernels.registry import get_kernel, interpreting
from rooflab.kernels.tuning import SHARED_BYTES_PER_CTA
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case

pytestmark = pytest.mark.skipif(not interpreting(), reason="runs Triton's interpreter")


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "M", "scheme"),
    [
        ("persistent", 4096, "bf16"),
        ("stream_k", 32, "bf16"),
        slow("persistent", 4096, "tf32"),
        slow("warp_specialized", 4096, "bf16"),
        slow("tma", 4096, "bf16"),
        slow("stream_k", 64, "tf32"),
        slow("split_k", 64, "bf16"),
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
        assert info.shared_bytes <= SHARED_BYTES_PER_CTA, info.asked
        assert name == "warp_specialized" or info.shared_bytes <= said(request.config)


@pytest.mark.more
def test_a_tile_whose_rows_are_shared_is_divided_through_shared_memory() -> None:
    kernel, case, scheme = get_kernel("gemm", "persistent"), SPEC.cases["llama3_8b"][-1], SCHEMES["tf32"]
    config = kernel.tuning.config_type(64, 256, 32, num_warps=8, num_stages=4, store_parts=2)
    assert not kernel.tuning.is_legal(config, case, scheme)
    assert kernel.tuning.is_legal(replace(config, num_warps=4), case, scheme)
    ((_, info),) = compiled([KernelCase("gemm", "persistent", case, scheme, config=config)])
    assert kernel.tuning.footprint(config, case, scheme).shared_bytes == info.shared_bytes > SHARED_BYTES_PER_CTA


@pytest.mark.parametrize("name", ["persistent", slow("tma"), slow("warp_specialized")])
def test_what_spills_with_both_addends_spills_once_a_tile(name: str) -> None:
    """128 by 256 outputs and a residual beside them are more than registers hold: 64 bytes a thread at most, which are
    0.1% of what a tile loads at K = 4096, and none in the loop over K."""
    case = Case(M=4096, N=4096, K=4096, layout="NT", bias=True, residual=True)
    ((_, info),) = compiled([KernelCase("gemm", name, case, SCHEMES["bf16"])])
    loop = hot_loop(info.loops)
    assert loop is not None and loop.counts["wgmma"] > 0
    assert loop.counts["spill_load"] == loop.counts["spill_store"] == 0
    assert info.stack_bytes <= (0 if name == "persistent" else 64)


def test_a_consumer_of_fewer_than_64_rows_is_illegal() -> None:
    kernel, case = get_kernel("gemm", "warp_specialized"), SPEC.cases["llama3_8b"][-1]
    config = kernel.tuning.heuristic(case)
    assert kernel.tuning.is_legal(config, case) and not kernel.tuning.is_legal(replace(config, block_m=64), case)


def test_the_caller_keeps_their_own_allocator() -> None:
    before = _allocation._allocator.get()
    square = torch.ones(16, 16).half()
    get_kernel("gemm", "warp_specialized")(a=square, b=square)
    assert _allocation._allocator.get() is before


LOOPED = {
    "persistent": (Case(M=768, N=400, K=72, layout="NT", bias=True, residual=True),
                   {"block_m": 64, "block_n": 32, "num_warps": 4, "store_parts": 1}),
    "warp_specialized": (Case(M=1550, N=400, K=72, layout="NN", bias=True, residual=True),
                         {"block_m": 128, "block_n": 32, "num_warps": 4}),
}  # fmt: skip
"""More tiles than the 132 SMs of an H100, so that CTAs come to a second one."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [0, 3])
@pytest.mark.parametrize("name", LOOPED)
def test_a_second_tile_is_right_and_races_with_nothing(name: str, schedule: int) -> None:
    case, values = LOOPED[name]
    config = get_kernel("gemm", name).tuning.config_type(block_k=64, num_stages=2, group_m=8, **values)
    found = call(KernelCase("gemm", name, case, SCHEMES["bf16"], config=config), schedule=schedule)
    assert found.answer["status"] == "OK", found.answer
    assert [launch["ctas"] for launch in found.answer["launches"]] == [132]
