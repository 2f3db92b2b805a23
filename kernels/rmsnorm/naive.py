"""The kernel `naive` computes the norm as a model's source code does, with one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows
from rooflab.kernels.launcher import kernel


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, round_first: bool = False
) -> torch.Tensor:
    """Computes the norm of x (T, H) in fp32, not rounded."""
    x32 = x.float()
    mean_square = x32.pow(2).mean(dim=-1, keepdim=True)  # (T, 1)
    normalized_x = x32 * torch.rsqrt(mean_square + eps)
    if round_first:
        normalized_x = normalized_x.to(x.dtype).float()
    return normalized_x * (weight.float() + weight_offset if weight_offset else weight.float())


@kernel(backend="torch")
def naive(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    quantize: str | None,
) -> None:
    """Computes `x / rms(x) * (weight + weight_offset)`, step by step."""
    write_rows(norm(x, weight, eps, weight_offset, round_first), out, scale)
