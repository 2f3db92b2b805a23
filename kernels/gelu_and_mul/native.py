"""For the CPU, in C++: the loop of `silu_and_mul/native` with gelu in place of silu."""

from __future__ import annotations

import torch

from rooflab.kernels.registry import register
from rooflab.kernels.silu_and_mul._operands import traffic
from rooflab.kernels.silu_and_mul.native import run


@register(op="gelu_and_mul", name="native", role="optimized", backend="cpp", devices=("cpu",), traffic=traffic)
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up in fp32, in its tanh form, rounded once.

    x: (T, 2 I), gate then up; returns (T, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    return run(x, out, gelu=True)
