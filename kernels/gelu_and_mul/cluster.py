"""Over fused: several vectors of 16 bytes a thread under way, short rows side by side, a persistent grid, and outputs
quantised in the same pass (`kernels/_rows_device.py`)."""

from __future__ import annotations

import torch

from rooflab.kernels._rows import Config, launch, row_outputs, tuning, why_not_taken
from rooflab.kernels.registry import register
from rooflab.kernels.silu_and_mul._operands import check_operands, traffic


@register(
    op="gelu_and_mul", name="cluster", role="optimized", backend="cuda", min_sm=90, devices=("cuda",),
    requires=("cupy",), traffic=traffic, tuning=tuning("gelu_and_mul"),
    unsupported=lambda inputs: why_not_taken("gelu_and_mul", inputs.x, inputs.x.shape[-1] // 2),
)  # fmt: skip
def gelu_and_mul(
    x: torch.Tensor,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    quantize: str | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """gelu(gate) * up, in its tanh form, in fp32, rounded once.

    x: (T, 2 I), gate first; returns (T, I), or with `quantize` codes (T, I) and scales (T,) fp32.  Raises `ValueError`
    on a wrong shape or dtype.
    """
    T, I = check_operands(x)
    result, scale = row_outputs(out, (T, I), x, quantize)
    launch("gelu_and_mul", x, result, second=x[:, I:], scale=scale, config=config)
    return result if scale is None else (result, scale)
