"""rmsnorm: values by hand, padding, eps, fp16 range, views, refusals."""

from __future__ import annotations

import pytest
import torch

from rooflab.kernels.registry import Kernel, get_kernel, kernels
from rooflab.reference.rmsnorm import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("rmsnorm").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_values_by_hand(kernel: Kernel) -> None:
    """mean(x^2) = (1 + 49) / 2 = 25, so x / rms = [0.2, -1.4]."""
    result = kernel(x=torch.tensor([[1.0, -7.0]]), weight=torch.tensor([10.0, 0.5]), eps=0.0)
    torch.testing.assert_close(result, torch.tensor([[2.0, -0.7]]))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_default_eps_and_a_row_of_zeros(kernel: Kernel) -> None:
    """eps = 1e-6: a row of 1e-3 has mean square eps and comes out as sqrt(1/2); zeros stay zeros."""
    x = torch.stack((torch.full((33,), 1e-3), torch.zeros(33)))
    result = kernel(x=x, weight=torch.ones(33))
    torch.testing.assert_close(result[0], torch.full((33,), 0.5**0.5))
    assert (result[1] == 0.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("hidden", [1, 3, 33, 576, 1025])
def test_the_mean_is_over_the_row_and_not_over_its_padding(kernel: Kernel, hidden: int) -> None:
    result = kernel(x=torch.full((2, hidden), -3.0), weight=torch.full((hidden,), 2.0), eps=0.0)
    torch.testing.assert_close(result, torch.full((2, hidden), -2.0))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_squares_past_the_fp16_range(kernel: Kernel) -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    result = kernel(x=x, weight=torch.full((64,), 0.5, dtype=torch.float16))
    assert (result == 0.5).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_rows_of_a_wider_buffer(kernel: Kernel) -> None:
    buffer = torch.full((3, 40), torch.nan)
    buffer[:, :33] = torch.randn(3, 33)
    weight = torch.randn(33)
    expected = kernel(x=buffer[:, :33].clone(), weight=weight)
    assert torch.equal(kernel(x=buffer[:, :33], weight=weight), expected)
    if kernel.takes_out:
        out = torch.full((5, 33), 7.0)
        kernel(x=buffer[:, :33], weight=weight, out=out[1:4])
        assert torch.equal(out[1:4], expected)
        assert (out[[0, 4]] == 7.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_no_rows(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8), weight=torch.ones(8)).shape == (0, 8)


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    x = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    x.copy_(torch.tensor([1.0, 2.0, 4.0])[:, None])
    result = kernel(x=x, weight=torch.ones(16, dtype=torch.float16), eps=0.0)
    assert (result == 1.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"x": torch.ones(2, 3, 4)}, r"x: expected shape \(\*, \*\), got \(2, 3, 4\)"),
        ({"x": torch.ones(4, 2).mT}, "x: expected stride 1"),
        ({"x": torch.ones(2, 4, dtype=torch.float64)}, "x: expected torch.float32 or .*, got torch.float64"),
        ({"weight": torch.ones(3)}, r"weight: expected shape \(4\), got \(3,\)"),
        ({"weight": torch.ones(4, dtype=torch.float16)}, "weight: expected torch.float32, got torch.float16"),
        ({"weight": torch.ones(8)[::2]}, "weight: expected stride 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**{"x": torch.ones(2, 4), "weight": torch.ones(4), **change})


def test_a_row_too_wide_for_registers_is_refused_by_name() -> None:
    kernel = get_kernel("rmsnorm", "fused")
    wide = {"x": torch.empty(1, 16385, device="meta"), "weight": torch.empty(16385, device="meta")}
    reason = kernel.why_not_args(wide).reason
    assert reason == "rmsnorm/fused: holds a row in registers, at most 16384 wide, got 16385"
    with pytest.raises(ValueError, match="x: holds a row in registers"):
        kernel.fn(**wide)
    fits = {"x": torch.empty(1, 16384, device="meta"), "weight": torch.empty(16384, device="meta")}
    assert kernel.why_not_args(fits) is None


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_norm_is_rejected(scheme: str) -> None:
    """A column that the sum misses (planted), a mean over padding, an eps left out."""
    case = Case(T=3, H=33, eps=1e-6)
    for label, inputs in SPEC.planted(case, SCHEMES[scheme], CPU, 0):
        oracle = SPEC.oracle(inputs)
        if label.startswith("column="):
            column = torch.tensor([int(label.removeprefix("column="))])
            rest = inputs["x"].double().index_fill(1, column, 0.0)
            scale = (rest.square().sum(1, keepdim=True) / 33 + inputs["eps"]).rsqrt()
        else:
            scale = inputs["x"].double().square().mean(1, keepdim=True).rsqrt()
        wrong = inputs["x"].double() * scale * inputs["weight"].double()
        assert not SPEC.judge((wrong,), oracle, inputs, SCHEMES[scheme])[0].passed
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    oracle = SPEC.oracle(inputs)
    assert not SPEC.judge((oracle[0] * (64 / 33) ** 0.5,), oracle, inputs, SCHEMES[scheme])[0].passed


def test_cost_moves_each_value_once() -> None:
    case = Case(T=2048, H=4096, eps=1e-5)
    cost = SPEC.cost(**SPEC.make_inputs(case, SCHEMES["bf16"], torch.device("meta"), 0))
    assert cost.bytes == 2 * (2 * 2048 * 4096 + 4096)
    assert cost.sfu_ops == 2048
