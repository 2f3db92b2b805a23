"""The two torch calls that a user would make without this op: add, then rms_norm."""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.fused_add_rmsnorm._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The add writes the sum and the norm reads it back."""
    size = nbytes(inputs.x)
    return steps((2 * size, size), (size + nbytes(inputs.weight), size))


@register(op="fused_add_rmsnorm", name="library", role="library", backend="torch", traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual) with `torch.add` and `rms_norm`; rms_norm takes no `out`.

    x, residual: (T, H); weight: (H,); returns two (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    check_operands(x, residual, weight)
    new_residual = torch.add(x, residual)
    return torch.nn.functional.rms_norm(new_residual, weight.shape, weight, eps), new_residual
