"""The two torch calls that a user would otherwise make: add, then rms_norm."""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.fused_add_rmsnorm._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The sum is written by the add and read back by the norm."""
    size = nbytes(inputs.x)
    return steps((2 * size, size), (size + nbytes(inputs.weight), size))


@register(op="fused_add_rmsnorm", name="library", role="library", backend="torch", traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual) with `torch.add` and `rms_norm`, of which the latter takes no `out`.

    x, residual: (T, H); weight: (H,); returns two (T, H). Raises `ValueError` on shapes or dtypes that do not fit.
    """
    check_operands(x, residual, weight)
    new_residual = torch.add(x, residual)
    return torch.nn.functional.rms_norm(new_residual, weight.shape, weight, eps), new_residual
