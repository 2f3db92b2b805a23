"""Over naive: the program of `silu_and_mul/fused` with gelu in place of silu."""

from __future__ import annotations

import torch

from rooflab.kernels.registry import register
from rooflab.kernels.silu_and_mul._operands import traffic
from rooflab.kernels.silu_and_mul.fused import TUNING, Config, launch


@register(op="gelu_and_mul", name="fused", role="optimized", backend="triton", traffic=traffic, tuning=TUNING)
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None, *, config: Config | None = None) -> torch.Tensor:
    """gelu(gate) * up in fp32, in its tanh form, rounded once.

    x: (T, 2 I); returns (T, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    return launch("gelu_and_mul", x, out, config)
