"""softmax: its range, columns of -inf, what its tolerance rejects."""

from __future__ import annotations

import math

import torch
from op_kernels import each, here

from rooflab.kernels.registry import Kernel

KERNELS = here("softmax")


@each(KERNELS)
def test_large_values_and_minus_infinity(kernel: Kernel) -> None:
    x = torch.tensor([[3e38, 3e38, -3e38], [-3e38, -math.inf, -3e38], [-math.inf, 5.0, -math.inf]])
    assert kernel(x=x).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
