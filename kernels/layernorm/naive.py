"""The kernel `naive` computes the norm by its formula, with one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float) -> None:
    """Computes `(x - mean) / sqrt(variance + eps) * weight + bias`, step by step."""
    x32 = x.float()
    centred_x = x32 - x32.mean(dim=-1, keepdim=True)
    variance = centred_x.pow(2).mean(dim=-1, keepdim=True)
    scaled_x = centred_x * torch.rsqrt(variance + eps) * weight.float()
    out.copy_(scaled_x if bias is None else scaled_x + bias.float())
