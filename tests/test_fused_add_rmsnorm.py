"""fused_add_rmsnorm: values by hand, the rounding of the sum, inputs left alone, refusals."""

from __future__ import annotations

import pytest
import torch

from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.fused_add_rmsnorm import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("fused_add_rmsnorm").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_values_by_hand(kernel: Kernel) -> None:
    """The sum is [1, -7], its mean square 25, so the norm is [0.2, -1.4] before the weight."""
    out, new_residual = kernel(
        x=torch.tensor([[0.5, -9.0]]), residual=torch.tensor([[0.5, 2.0]]), weight=torch.tensor([10.0, 0.5]), eps=0.0
    )
    assert new_residual.tolist() == [[1.0, -7.0]]
    torch.testing.assert_close(out, torch.tensor([[2.0, -0.7]]))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_the_sum_is_rounded_to_nearest_even(kernel: Kernel) -> None:
    """fp16 is two apart from 2048 on: 2049 goes down to 2048, 2051 up to 2052, and 65519 to the largest, 65504."""
    x = torch.tensor([[2048.0, 2048.0, 65504.0, 1.0]], dtype=torch.float16)
    residual = torch.tensor([[1.0, 3.0, 15.0, 2.0**-12]], dtype=torch.float16)
    _, new_residual = kernel(x=x, residual=residual, weight=torch.ones(4, dtype=torch.float16))
    assert new_residual.tolist() == [[2048.0, 2052.0, 65504.0, 1.0]]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_inputs_are_left_alone_and_outputs_are_new(kernel: Kernel) -> None:
    x, residual, weight = torch.randn(3, 33), torch.randn(3, 33), torch.randn(33)
    before = x.clone(), residual.clone(), weight.clone()
    out, new_residual = kernel(x=x, residual=residual, weight=weight)
    for now, then in zip((x, residual, weight), before, strict=True):
        assert torch.equal(now, then)
    assert len({t.data_ptr() for t in (x, residual, out, new_residual)}) == 4
    assert torch.equal(new_residual, x + residual)


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("hidden", [1, 33, 576])
def test_the_mean_is_over_the_row_and_not_over_its_padding(kernel: Kernel, hidden: int) -> None:
    ones = torch.ones(2, hidden)
    out, _ = kernel(x=ones, residual=2.0 * ones, weight=torch.full((hidden,), 2.0), eps=0.0)
    torch.testing.assert_close(out, torch.full((2, hidden), 2.0))


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.takes_out], ids=by_id)
def test_out_is_a_pair_in_the_order_of_the_outputs(kernel: Kernel) -> None:
    inputs = SPEC.make_inputs(Case(T=2, H=33, eps=1e-6), SCHEMES["fp32"], CPU, 0)
    buffer = torch.full((2, 4, 33), 7.0)
    out = (buffer[0, 1:3], buffer[1, 1:3])
    result = kernel(**inputs, out=out)
    expected = kernel(**inputs)
    for given, got, want in zip(out, result, expected, strict=True):
        assert given.data_ptr() == got.data_ptr()
        assert torch.equal(got, want)
    assert (buffer[:, [0, 3]] == 7.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_rows_of_wider_buffers_and_no_rows(kernel: Kernel) -> None:
    x, residual = torch.randn(3, 40)[:, :33], torch.randn(3, 50)[:, :33]
    weight = torch.randn(33)
    expected = kernel(x=x.clone(), residual=residual.clone(), weight=weight)
    for got, want in zip(kernel(x=x, residual=residual, weight=weight), expected, strict=True):
        assert torch.equal(got, want)
    empty = kernel(x=x[:0], residual=residual[:0], weight=weight)
    assert [tuple(t.shape) for t in empty] == [(0, 33), (0, 33)]


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    x = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    x.copy_(torch.tensor([1.0, 2.0, 4.0])[:, None])
    out, new_residual = kernel(x=x, residual=x, weight=torch.ones(16, dtype=torch.float16), eps=0.0)
    assert new_residual[:, 0].tolist() == [2.0, 4.0, 8.0]
    assert (out == 1.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"x": torch.ones(4)}, r"x: expected shape \(\*, \*\), got \(4,\)"),
        ({"residual": torch.ones(1, 4)}, r"residual: expected shape \(2, 4\), got \(1, 4\)"),
        ({"residual": torch.ones(2, 4).half()}, "residual: expected torch.float32, got torch.float16"),
        ({"residual": torch.ones(4, 2).mT}, "residual: expected stride 1"),
        ({"weight": torch.ones(3)}, r"weight: expected shape \(4\), got \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**{"x": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4), **change})


def test_a_row_too_wide_for_registers_is_refused_by_name() -> None:
    kernel = get_kernel("fused_add_rmsnorm", "fused")
    wide = torch.empty(1, 20000, device="meta")
    reason = kernel.why_not_args({"x": wide, "residual": wide, "weight": wide[0]}).reason
    assert reason == "fused_add_rmsnorm/fused: holds a row in registers, at most 16384 wide, got 20000"
    with pytest.raises(ValueError, match="x: holds a row in registers"):
        kernel.fn(wide, wide, wide[0])


def test_an_unrounded_sum_is_rejected() -> None:
    """The residual stream is what the dtype holds; a sum kept in fp32 is another op."""
    inputs = SPEC.make_inputs(Case(T=2, H=64, eps=1e-6), SCHEMES["bf16"], CPU, 0)
    oracle = SPEC.oracle(inputs)
    unrounded = inputs["x"].double() + inputs["residual"].double()
    out, new_residual = SPEC.judge((oracle[0], unrounded), oracle, inputs, SCHEMES["bf16"])
    assert out.passed
    assert not new_residual.passed
