"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._rows import Config, launch, tuning, why_not_taken
from rooflab.kernels.registry import register
from rooflab.kernels.softmax._operands import check_operands, traffic


@register(
    op="softmax", name="cluster", role="optimized", backend="cuda", min_sm=90, devices=("cuda",),
    requires=("cupy",), traffic=traffic, tuning=tuning("softmax"),
    unsupported=lambda inputs: why_not_taken("softmax", inputs.x, inputs.x.shape[-1]),
)  # fmt: skip
def softmax(x: torch.Tensor, out: torch.Tensor | None = None, *, config: Config | None = None) -> torch.Tensor:
    """exp(x - max) / sum in fp32, rounded once.

    x: (T, H), each row with a finite value; returns (T, H); out may be x.  Raises `ValueError` on a wrong shape or
    dtype.
    """
    result = output(out, check_operands(x), x)
    launch("softmax", x, result, config=config)
    return result
