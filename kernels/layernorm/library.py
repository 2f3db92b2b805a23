"""torch's layer_norm."""

from __future__ import annotations

import torch

from rooflab.kernels.layernorm._operands import check_operands, traffic
from rooflab.kernels.registry import register


@register(op="layernorm", name="library", role="library", backend="torch", traffic=traffic)
def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias with `layer_norm`, which takes no `out`.

    x: (T, H); weight, bias: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    check_operands(x, weight, bias)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
