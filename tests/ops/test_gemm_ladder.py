"""The Triton rungs of gemm: what TMA refuses and in which words, tiles, and what they need."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from compiled_sizes import compiled
from op_kernels import each, slow
from triton.runtime import _allocation

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.flow import hot_loop
from rooflab.bench.emulate.calls import call
from rooflab.kernels.gemm._operands import stored
from rooflab.kernels.registry import Kernel, get_kernel, interpreting
from rooflab.reference.gemm import SPEC
from rooflab.reference.spec import SCHEMES, Case
from rooflab.roofline.occupancy import HOPPER

RUNGS = [get_kernel("gemm", name) for name in ("tensor_core", "pipelined", "tma", "persistent", "warp_specialized")]
BY_TMA = RUNGS[2:]
STORED_BY_TMA = RUNGS[3:]
pytestmark = pytest.mark.skipif(not interpreting(), reason="runs Triton's interpreter")


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers in fp16: their products and sums are exact in fp32, and here in fp16."""
    values = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.float16)


def expected(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).half()


WANTED = "an address and row stride of whole 16 bytes for TMA, stride 1 along rows that do not overlap"
SQUARE = whole(16, 16)


@each(BY_TMA)
def test_what_tma_cannot_reach_names_the_rung_that_can(kernel: Kernel) -> None:
    for operands, message in [
        ((whole(16, 24)[:, 4:20], SQUARE), f"a: expected {WANTED}, got address % 16 = 8 and strides of 48 and 2"),
        ((whole(16, 12), whole(12, 16)), f"a: expected {WANTED}, got address % 16 = 0 and strides of 24 and 2"),
        ((SQUARE, whole(16, 20)[:, :16]), f"b: expected {WANTED}"),
        ((whole(16, 32)[:, ::2], SQUARE), f"a: expected {WANTED}, got address % 16 = 0 and strides of 64 and 4"),
        ((whole(1, 16).expand(16, 16), SQUARE), f"a: expected {WANTED}, got address % 16 = 0 and strides of 0"),
        ((SQUARE.float(), SQUARE.float()), "precision: expected tf32 with torch.float32 operands, got ieee"),
    ]:
        a, b = operands
        reason = kernel.why_not_args({"a": a, "b": b}).reason
        assert reason.startswith(f"gemm/{kernel.name}: ") and message in reason and "; gemm/pipelined takes " in reason
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel.fn(a, b)
        assert get_kernel("gemm", "pipelined")(a=a, b=b).equal((a.double() @ b.double()).to(a.dtype))


@each(BY_TMA)
def test_tf32_needs_k_innermost(kernel: Kernel) -> None:
    a, b = whole(16, 16, seed=1).float(), whole(16, 16, seed=2).float()
    assert kernel(a=a, b=b.mT, precision="tf32").equal(a @ b.mT)
    for name, inputs in (("a", {"a": a.mT, "b": b.mT}), ("b", {"a": a, "b": b})):
        reason = kernel.why_not_args({**inputs, "precision": "tf32"}).reason
        assert reason.startswith(f"gemm/{kernel.name}: {name}: ") and "stride 1 along K" in reason


@each(STORED_BY_TMA)
def test_a_result_that_tma_cannot_store_is_for_the_rung_below(kernel: Kernel) -> None:
    a, b = whole(16, 16), whole(12, 16).mT
    reason = kernel.why_not_args({"a": a, "b": b}).reason
    assert "b: expected N of whole 16 bytes" in reason and "gemm/tma takes it" in reason
    assert get_kernel("gemm", "tma")(a=a, b=b).equal(expected(a, b))
    assert kernel(a=a[:1], b=b).equal(expected(a[:1], b)), "one row has no stride"
    with pytest.raises(ValueError, match="out: expected an address and row stride of whole 16 bytes"):
        kernel(a=a, b=whole(16, 8), out=whole(16, 12)[:, 4:])


def test_how_tma_sees_a_matrix() -> None:
    for matrix, k_dim, found in [
        (whole(16, 24), 1, (16, 24, 24, False)),
        (whole(16, 24), 0, (16, 24, 24, False)),
        (whole(16, 24).mT, 0, (16, 24, 24, True)),
        (whole(16, 24)[:, :13], 1, (16, 13, 24, False)),
        (whole(1, 13), 1, (1, 13, 16, False)),  # a single row's stride is never used
        (whole(13, 1), 1, (1, 13, 16, True)),
        (whole(1, 1), 1, (1, 1, 8, False)),
        (whole(1, 1), 0, (1, 1, 8, True)),
        (whole(2, 13), 1, None),
        (whole(1, 16).expand(4, 16), 1, None),
        (torch.empty(4, 8, dtype=torch.float16, device="meta")[:, 1:], 1, None),
        (torch.empty(2, 1, dtype=torch.float16, device="meta").as_strided((2, 16), (2**39, 1)), 1, None),
    ]:
        seen = stored(matrix, k_dim)
        assert (seen and (seen.rows, seen.columns, seen.stride, seen.transposed)) == found


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
        assert info.shared_bytes <= HOPPER.shared_bytes_per_cta, info.asked
        assert name == "warp_specialized" or info.shared_bytes <= said(request.config)


@pytest.mark.more
def test_a_tile_whose_rows_are_shared_is_divided_through_shared_memory() -> None:
    kernel, case, scheme = get_kernel("gemm", "persistent"), SPEC.cases["llama3_8b"][-1], SCHEMES["tf32"]
    config = kernel.tuning.config_type(64, 256, 32, num_warps=8, num_stages=4, store_parts=2)
    assert not kernel.tuning.is_legal(config, case, scheme)
    assert kernel.tuning.is_legal(replace(config, num_warps=4), case, scheme)
    ((_, info),) = compiled([KernelCase("gemm", "persistent", case, scheme, config=config)])
    assert kernel.tuning.footprint(config, case, scheme).shared_bytes == info.shared_bytes > HOPPER.shared_bytes_per_cta


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
    get_kernel("gemm", "warp_specialized")(a=SQUARE, b=SQUARE)
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
