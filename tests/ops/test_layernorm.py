"""layernorm: a mean far above the spread."""

from __future__ import annotations

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


def test_the_mean_of_squares_minus_the_squared_mean_is_rejected() -> None:
    fp32 = SCHEMES["fp32"]
    large = dict(SPEC.planted(Case(T=3, H=33, bias=True, eps=1e-5), fp32, CPU, 0))["mean of 1000"]
    x = large["x"]
    variance = x.square().mean(1, keepdim=True) - x.mean(1, keepdim=True).square()
    cancelled = (x - x.mean(1, keepdim=True)) * (variance + 1e-5).rsqrt() * large["weight"] + large["bias"]
    assert not SPEC.judge((cancelled,), SPEC.oracle(large), large, fp32)[0].passed
