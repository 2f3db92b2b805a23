"""The torch calls that a user would make without this op: add, then rms_norm."""

from __future__ import annotations

import torch

from rooflab.kernels.fused_add_rmsnorm._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rmsnorm import library
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The add writes the sum and the norm reads it back."""
    size, norm = nbytes(inputs.x), library.traffic(inputs)
    return Traffic(2 * size + norm.read_bytes, size + norm.write_bytes, launches=1 + norm.launches)


@register(op="fused_add_rmsnorm", name="library", role="library", backend="torch", traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual) with `torch.add` and `rms_norm`; rms_norm takes no `out`.

    x, residual: (T, H); weight: (H,); returns two (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    check_operands(x, residual, weight)
    new_residual = torch.add(x, residual)
    return library.call(new_residual, weight, eps, weight_offset, round_first), new_residual
