"""layernorm: a mean far above the spread."""

from __future__ import annotations

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel

KERNELS = here("layernorm")


@each(KERNELS)
def test_a_row_of_one_value_becomes_the_bias(kernel: Kernel) -> None:
    """Its variance is 0, also where squares of its values are not exact."""
    x = torch.full((2, 33), 1234.567)
    result = kernel(x=x, weight=torch.full((33,), 2.0), bias=torch.arange(33.0))
    torch.testing.assert_close(result, torch.arange(33.0).expand(2, 33), rtol=0, atol=0.3)
    assert kernel(x=torch.zeros(1, 5), weight=torch.ones(5)).abs().max() == 0
