"""Implements `naive`: residual add and norm as in a model's code, one torch call per step, the norm in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows
from rooflab.kernels.launcher import kernel
from rooflab.kernels.rmsnorm.naive import norm


@kernel(backend="torch")
def naive(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    new_residual: Tensor,
    scale: Tensor | None,
    *,
    eps: float,
    weight_offset: float,
    round_first: bool,
    quantize: str | None,
) -> None:
    """Computes `s = x + residual` and `rmsnorm(s)`, step by step."""
    torch.add(x, residual, out=new_residual)
    write_rows(norm(new_residual, weight, eps, weight_offset, round_first), out, scale)
