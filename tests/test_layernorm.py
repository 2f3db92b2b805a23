"""layernorm: a mean far above the spread, what its tolerance rejects."""

from __future__ import annotations

import pytest
import torch
from op_kernels import CPU, each, here

from rooflab.kernels.registry import Kernel
from rooflab.reference.layernorm import SPEC
from rooflab.reference.spec import SCHEMES, Case

KERNELS = here("layernorm")


@each(KERNELS)
def test_a_row_of_one_value_becomes_the_bias(kernel: Kernel) -> None:
    """Its variance is 0, also where squares of its values are not exact."""
    x = torch.full((2, 33), 1234.567)
    result = kernel(x=x, weight=torch.full((33,), 2.0), bias=torch.arange(33.0))
    torch.testing.assert_close(result, torch.arange(33.0).expand(2, 33), rtol=0, atol=0.3)
    assert kernel(x=torch.zeros(1, 5), weight=torch.ones(5)).abs().max() == 0


@pytest.mark.parametrize("scheme", ["fp32", "fp16", "bf16"])
def test_a_wrong_norm_is_rejected(scheme: str) -> None:
    """No mean taken off, a variance over H - 1, no bias; in fp32 also the mean of squares minus the squared mean."""
    case = Case(T=3, H=33, bias=True, eps=1e-5)
    inputs = SPEC.make_inputs(case, SCHEMES[scheme], CPU, 0)
    oracle, x = SPEC.oracle(inputs), inputs["x"].double()
    weight, bias, centred = inputs["weight"].double(), inputs["bias"].double(), x - x.mean(1, keepdim=True)
    wrong = [
        x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight + bias,
        centred * (x.var(1, keepdim=True) + 1e-5).rsqrt() * weight + bias,
        oracle[0] - bias,
    ]
    assert not any(SPEC.judge((values,), oracle, inputs, SCHEMES[scheme])[0].passed for values in wrong)
    if scheme == "fp32":
        large = dict(SPEC.planted(case, SCHEMES[scheme], CPU, 0))["mean of 1000"]
        x = large["x"]
        variance = x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()
        cancelled = (x - x.mean(1, keepdim=True)) * (variance + 1e-5).rsqrt() * large["weight"] + large["bias"]
        assert not SPEC.judge((cancelled,), SPEC.oracle(large), large, SCHEMES[scheme])[0].passed
