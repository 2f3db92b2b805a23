"""Implements the kernel `library` with torch's `add` and `rms_norm`, as a user without this project writes the op."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.rmsnorm import library as rmsnorm


@kernel(backend="torch")
def library(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    """Computes `s = x + residual` by `torch.add`, and `rms_norm(s)`, which has no argument `out`."""
    new_residual = torch.add(x, residual)
    return rmsnorm.call(new_residual, weight, eps, weight_offset, round_first), new_residual
