"""The residual add and the norm as a model's source code writes them: one torch call per step, the norm in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._traffic import steps
from rooflab.kernels.fused_add_rmsnorm._operands import check_operands, outputs
from rooflab.kernels.registry import Arguments, register
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32 after the add."""
    x = inputs.x
    T, H = x.shape
    full, rows, hidden = 4 * T * H, 4 * T, 4 * H
    narrow = x.element_size() * T * H
    casts = [] if x.dtype == torch.float32 else [(narrow, full), (x.element_size() * H, hidden)]  # sum, weight to fp32
    return steps(
        (2 * narrow, narrow),  # x + residual
        *casts,
        (full, full),  # square
        (full, rows),  # mean
        (rows, rows),  # + eps
        (rows, rows),  # rsqrt
        (full + rows, full),  # sum * rsqrt
        (full + hidden, narrow),  # * weight
    )


@register(op="fused_add_rmsnorm", name="naive", role="naive", backend="torch", traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual), step by step.

    x, residual: (T, H); weight: (H,); returns two (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    shape = check_operands(x, residual, weight)
    normed, new_residual = outputs(out, shape, x)
    torch.add(x, residual, out=new_residual)
    sum32 = new_residual.float()
    mean_square = sum32.pow(2).mean(dim=-1, keepdim=True)  # (T, 1)
    normalized = sum32 * torch.rsqrt(mean_square + eps)
    torch.mul(normalized, weight.float(), out=normed)
    return normed, new_residual
