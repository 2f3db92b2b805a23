"""Over fused: rows of any width in the registers of up to eight CTAs (`rmsnorm/cluster` says how)."""

from __future__ import annotations

import torch

from rooflab.kernels._rows import Config, launch, tuning, why_not_taken
from rooflab.kernels.fused_add_rmsnorm._operands import Out, check_operands, outputs, returned, traffic
from rooflab.kernels.registry import register


@register(
    op="fused_add_rmsnorm", name="cluster", role="optimized", backend="cuda", min_sm=90, devices=("cuda",),
    requires=("cupy",), traffic=traffic, tuning=tuning("fused_add_rmsnorm"),
    unsupported=lambda inputs: why_not_taken("fused_add_rmsnorm", inputs.x, inputs.x.shape[-1]),
)  # fmt: skip
def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Out | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
    quantize: str | None = None,
    config: Config | None = None,
) -> Out:
    """(rmsnorm(x + residual), x + residual) in fp32; the sum is rounded before the norm.

    x, residual: (T, H); weight: (H,); returns two (T, H), the first as codes with scales (T,) fp32 behind them if
    `quantize` is given.  Raises `ValueError` on wrong shapes or dtypes.
    """
    normed, sums, scale = outputs(out, check_operands(x, residual, weight), x, quantize)
    launch(
        "fused_add_rmsnorm", x, normed, second=residual, weight=weight, sums=sums, scale=scale, eps=eps,
        weight_offset=weight_offset, round_first=round_first, config=config,
    )  # fmt: skip
    return returned(normed, sums, scale)
