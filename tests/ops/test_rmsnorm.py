"""rmsnorm: eps, fp16 range, what its tolerance rejects."""

from __future__ import annotations

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel

KERNELS = here("rmsnorm")


@each(KERNELS)
def test_default_eps_and_a_row_of_zeros(kernel: Kernel) -> None:
    """eps = 1e-6: a row of 1e-3 has mean square eps and comes out as sqrt(1/2); zeros stay zeros."""
    x = torch.stack((torch.full((33,), 1e-3), torch.zeros(33)))
    result = kernel(x=x, weight=torch.ones(33))
    torch.testing.assert_close(result[0], torch.full((33,), 0.5**0.5))
    assert (result[1] == 0.0).all()


@each(KERNELS)
def test_squares_past_the_fp16_range(kernel: Kernel) -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    result = kernel(x=x, weight=torch.full((64,), 0.5, dtype=torch.float16))
    assert (result == 0.5).all()
