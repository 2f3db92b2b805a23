"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._rows import Config, launch, tuning, why_not_taken
from rooflab.kernels.layernorm._operands import check_operands, traffic
from rooflab.kernels.registry import register


@register(
    op="layernorm", name="cluster", role="optimized", backend="cuda", min_sm=90, devices=("cuda",),
    requires=("cupy",), traffic=traffic, tuning=tuning("layernorm"),
    unsupported=lambda inputs: why_not_taken("layernorm", inputs.x, inputs.x.shape[-1]),
)  # fmt: skip
def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in fp32, rounded once; the variance after the mean.

    x: (T, H); weight, bias: (H,); returns (T, H); out may be x.  Raises `ValueError` on wrong shapes or dtypes.
    """
    result = output(out, check_operands(x, weight, bias), x)
    launch("layernorm", x, result, weight=weight, bias=bias, eps=eps, config=config)
    return result
