"""Over fused: rows of any width in the registers of up to eight CTAs, short rows side by side, and a persistent grid.

The device code is that of `kernels/_rows_device.py`: a thread has several vectors of 16 bytes under way, a row that is
too long for one CTA is split over a cluster, whose sums meet in distributed shared memory without a second launch, and
the output may be quantised in the same pass.
"""

from __future__ import annotations

import torch

from rooflab.kernels._rows import Config, launch, row_outputs, tuning, why_not_taken
from rooflab.kernels.registry import register
from rooflab.kernels.rmsnorm._operands import check_operands, traffic


@register(
    op="rmsnorm", name="cluster", role="optimized", backend="cuda", min_sm=90, devices=("cuda",),
    requires=("cupy",), traffic=traffic, tuning=tuning("rmsnorm"),
    unsupported=lambda inputs: why_not_taken("rmsnorm", inputs.x, inputs.x.shape[-1]),
)  # fmt: skip
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
    quantize: str | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * (weight + weight_offset) in fp32, rounded once; with `round_first`, x / rms is rounded too.

    x: (T, H); weight: (H,); returns (T, H), or with `quantize` codes (T, H) and scales (T,) fp32.  Rows may be any
    distance apart; out may be x.  Raises `ValueError` on wrong shapes or dtypes.
    """
    result, scale = row_outputs(out, check_operands(x, weight), x, quantize)
    launch(
        "rmsnorm", x, result, weight=weight, scale=scale, eps=eps, weight_offset=weight_offset,
        round_first=round_first, config=config,
    )  # fmt: skip
    return result if scale is None else (result, scale)
