"""fused_add_rmsnorm: the rounding of the sum, what its tolerance rejects."""

from __future__ import annotations

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel

KERNELS = here("fused_add_rmsnorm")


@each(KERNELS)
def test_the_sum_is_rounded_to_nearest_even(kernel: Kernel) -> None:
    """fp16 is two apart from 2048 on: 2049 goes down to 2048, 2051 up to 2052, and 65519 to the largest, 65504."""
    x = torch.tensor([[2048.0, 2048.0, 65504.0, 1.0]], dtype=torch.float16)
    residual = torch.tensor([[1.0, 3.0, 15.0, 2.0**-12]], dtype=torch.float16)
    _, new_residual = kernel(x=x, residual=residual, weight=torch.ones(4, dtype=torch.float16))
    assert new_residual.tolist() == [[2048.0, 2052.0, 65504.0, 1.0]]
