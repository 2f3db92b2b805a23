"""silu_and_mul: values by hand, the order of the halves, overflow of exp, views, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from rooflab.kernels.registry import Kernel, kernels
from rooflab.reference.silu_and_mul import SPEC
from rooflab.reference.spec import SCHEMES, Case

CPU = torch.device("cpu")
KERNELS = [kernel for kernel in kernels("silu_and_mul").values() if kernel.why_not_here(CPU) is None]
TRITON = [kernel for kernel in KERNELS if kernel.backend == "triton"]
by_id = lambda kernel: kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_values_by_hand(kernel: Kernel) -> None:
    """silu(1) = 1 / (1 + 1/e); the first half is the gate, so swapped halves give 1 silu(2) instead."""
    result = kernel(x=torch.tensor([[1.0, 0.0, -1.0, 2.0, 5.0, 3.0]]))
    silu_1 = 1.0 / (1.0 + math.exp(-1.0))
    torch.testing.assert_close(result, torch.tensor([[2.0 * silu_1, 0.0, 3.0 * (silu_1 - 1.0)]]))


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_exp_does_not_overflow_into_the_result(kernel: Kernel, dtype: torch.dtype) -> None:
    gate = [-60000.0, -1000.0, -100.0, 100.0, 1000.0, 60000.0]
    result = kernel(x=torch.tensor([[*gate, *[0.5] * 6]], dtype=dtype))
    assert result[0, :3].abs().max() <= 1e-38
    assert result[0, 3:].tolist() == [50.0, 500.0, 30000.0]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
@pytest.mark.parametrize("half", [1, 33, 1025])
def test_rows_of_a_wider_buffer(kernel: Kernel, half: int) -> None:
    buffer = torch.full((2, 2 * half + 3), torch.nan)
    x = buffer[:, : 2 * half]
    x.copy_(torch.randn(2, 2 * half))
    buffer_out = torch.full((4, half), 7.0)
    kernel(x=x, out=buffer_out[1:3])
    expected = torch.nn.functional.silu(x[:, :half].double()) * x[:, half:].double()
    torch.testing.assert_close(buffer_out[1:3], expected.float())
    assert (buffer_out[[0, 3]] == 7.0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8)).shape == (0, 4)
    assert kernel(x=torch.ones(3, 0)).shape == (3, 0)


@pytest.mark.parametrize("kernel", TRITON, ids=by_id)
def test_offsets_past_2_31(kernel: Kernel) -> None:
    """Rows 2**30 apart: the third starts at 2**31. The storage is only touched where the rows are."""
    x = torch.empty(2**31 + 16, dtype=torch.float16).as_strided((3, 16), (2**30, 1))
    x.copy_(torch.tensor([100.0, 200.0, 300.0])[:, None])
    x[:, 8:] = 2.0
    assert kernel(x=x)[:, 7].tolist() == [200.0, 400.0, 600.0]


@pytest.mark.parametrize("kernel", KERNELS, ids=by_id)
def test_refusals(kernel: Kernel) -> None:
    for change, message in [
        ({"x": torch.ones(2, 7)}, "x: expected an even last dimension, gate and up, got 7"),
        ({"x": torch.ones(8)}, r"x: expected shape \(\*, \*\), got \(8,\)"),
        ({"x": torch.ones(8, 2).mT}, "x: expected stride 1"),
        ({"x": torch.ones(2, 8, dtype=torch.int64)}, "x: expected torch.float32 or .*, got torch.int64"),
        ({"out": torch.ones(2, 8)}, r"out: expected shape \(2, 4\), got \(2, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel(**{"x": torch.ones(2, 8), **change})


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_activation_is_rejected(scheme: str) -> None:
    """gelu in place of silu, and the halves swapped."""
    inputs = SPEC.make_inputs(Case(T=4, I=33), SCHEMES[scheme], CPU, 0)
    gate, up = inputs["x"].double().chunk(2, dim=-1)
    oracle = SPEC.oracle(inputs)
    for wrong in (torch.nn.functional.gelu(gate) * up, torch.nn.functional.silu(up) * gate):
        assert not SPEC.judge((wrong,), oracle, inputs, SCHEMES[scheme])[0].passed


def test_cost_reads_two_and_writes_one() -> None:
    inputs = SPEC.make_inputs(Case(T=512, I=1536), SCHEMES["bf16"], torch.device("meta"), 0)
    cost = SPEC.cost(**inputs)
    assert (cost.read_bytes, cost.write_bytes) == (2 * 512 * 3072, 2 * 512 * 1536)
