"""The kernel `library` calls torch's rms_norm.  For `round_first` or an offset it makes a few more torch calls."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel


def call(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, round_first: bool = False
) -> torch.Tensor:
    """Computes the norm of x (T, H) by one torch call if possible, by more for `round_first` or an offset."""
    if not weight_offset and not round_first:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    if round_first and not weight_offset:
        return torch.nn.functional.rms_norm(x, weight.shape, None, eps) * weight
    normed_x = torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps)
    normed_x = normed_x.to(x.dtype) if round_first else normed_x
    return (normed_x * (weight.float() + weight_offset)).to(x.dtype)


@kernel(backend="torch")
def library(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    """Computes `x / rms(x) * (weight + weight_offset)` by `torch.nn.functional.rms_norm`, which has no `out`."""
    return call(x, weight, eps, weight_offset, round_first)
