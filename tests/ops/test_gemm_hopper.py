"""gemm in CUDA C++, and its rungs for few rows of a: strides, how work is shared out, partial sums, and rings."""

from __future__ import annotations

import pytest
import torch
from compiled import compile_kernel
from op_kernels import CPU, META, assert_right, emulated

from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import SCHEMES, Case

BF16 = SCHEMES["bf16"]


@pytest.mark.parametrize("name", ["one_thread", "shared_tiles"])
@pytest.mark.parametrize("first", [3, 4])
def test_any_strides(name: str, first: int) -> None:
    """Views whose every other element is NaN, a residual and an out in wider buffers, at an odd address or a whole."""
    a = torch.full((34, 66), torch.nan)[::2, ::2]
    b = torch.full((66, 38), torch.nan)[::2, ::2]
    a.copy_(torch.randn(17, 33))
    b.copy_(torch.randn(33, 19))
    residual, buffer = torch.randn(17, 30)[:, 5:24], torch.full((19, 24), 7.0)
    kernel = get_kernel("gemm", name)
    out, _ = emulated(kernel, a, b, residual=residual, out=buffer[1:18, first : first + 19])
    found, _ = emulated(kernel, torch.ones(2, 0), torch.ones(0, 8), torch.ones(8), residual=torch.ones(2, 8))
    torch.testing.assert_close(out, (a.double() @ b.double() + residual).float())
    assert int((buffer == 7.0).sum()) == 19 * 24 - 17 * 19
    assert found.tolist() == [[2.0] * 8] * 2, "without a K the addends remain"


@pytest.mark.parametrize(
    ("op", "name", "case", "scheme", "config"),
    [
        ("gemm", "gemv", "M=1,N=9,K=1032,layout=NT,bias=false", "bf16", (1, 1, 2, 2)),
        ("gemm", "swap_ab", "M=5,N=136,K=264,layout=NT,bias=false,residual=true", "bf16", (8, 128, 64, 3, 2)),
        ("gemm_w4a16", "gemv", "M=3,N=21,K=2304,zeros=true,bias=false", "w4a16_g128", (4, 1, 1, 2)),
        ("gemm_w4a16", "gemv", "M=2,N=21,K=520,zeros=false,bias=true", "w4a16_g64", (4, 2, 2, 2)),
    ],
)
def test_shares_of_k_that_end_anywhere(op: str, name: str, case: str, scheme: str, config: tuple[int, ...]) -> None:
    """Warps in an order that lets the CTAs of a cluster end at different times."""
    spec, kernel = get_op(op), get_kernel(op, name)
    inputs = spec.make_inputs(spec.check_case(Case.parse(case)), SCHEMES[scheme], CPU, 0)
    b = kernel.prepare(inputs["b"]) if kernel.prepare else inputs["b"]
    out, _ = emulated(kernel, **inputs | {"b": b}, config=kernel.tuning.config_type(*config), order=3)
    assert_right(spec, out, inputs, SCHEMES[scheme])


def case_of(M: int, N: int, K: int, **more: bool) -> Case:
    return Case(M=M, N=N, K=K, layout="NT", bias=False, **more)


@pytest.mark.parametrize("name", ["split_k", "stream_k"])
def test_traffic_counts_the_partial_sums(name):
    kernel, case = get_kernel("gemm", name), case_of(16, 4096, 4096)
    inputs = get_op("gemm").make_inputs(case, BF16, META, 0)
    least, said, tile = get_op("gemm").cost_of(inputs), kernel.traffic_of(inputs), kernel.tuning.heuristic(case, BF16)
    sums = 16 * 4096 * tile.split if name == "split_k" else 2 * HOPPER_SMS * tile.block_m * tile.block_n
    assert (said.read_bytes, said.write_bytes) == (least.read_bytes + 4 * sums, least.write_bytes + 4 * sums)
    assert said.launches == 2


@pytest.mark.more
def test_rows_past_65535_are_in_the_only_dimension_of_a_grid_that_goes_on():
    config = get_kernel("gemm", "split_k").tuning.config_type(64, 64, 64, split=2, num_warps=4, num_stages=3)
    found = compile_kernel("gemm", "split_k", case_of(70_000, 300, 256), BF16, config=config)
    assert [info.grid for info in found] == [(1094 * 5, 2), (70_000, 2)]


@pytest.mark.more
@pytest.mark.parametrize(("N", "K"), [(4096, 4096), (128 * 2 * HOPPER_SMS, 4096), (4096, 1)])
def test_stream_k_adds_up_only_where_a_tile_was_cut(N, K):
    """Not where each CTA has two whole tiles, and not where a tile is one step: it cannot be cut."""
    case = case_of(16, N, K)
    launched = compile_kernel("gemm", "stream_k", case, BF16)
    said = get_kernel("gemm", "stream_k").traffic_of(get_op("gemm").make_inputs(case, BF16, META, 0))
    assert len(launched) == said.launches == (2 if (N, K) == (4096, 4096) else 1)
