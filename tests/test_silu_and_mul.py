"""silu_and_mul: empty sizes."""

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel


@each(here("silu_and_mul"))
def test_empty_sizes(kernel: Kernel) -> None:
    assert kernel(x=torch.ones(0, 8)).shape == (0, 4)
    assert kernel(x=torch.ones(3, 0)).shape == (3, 0)
