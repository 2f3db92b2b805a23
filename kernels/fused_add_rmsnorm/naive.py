"""The residual add and the norm as a model's source code writes them: one torch call per step, the norm in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._rows import quantize_rows
from rooflab.kernels._traffic import steps
from rooflab.kernels.fused_add_rmsnorm._operands import Out, check_operands, outputs, returned
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rmsnorm.naive import norm, norm_moves
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32 after the add."""
    narrow = inputs.x.element_size() * inputs.x.numel()
    return steps((2 * narrow, narrow), *norm_moves(inputs))


@register(op="fused_add_rmsnorm", name="naive", role="naive", backend="torch", traffic=traffic)
def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: Out | None = None,
    *,
    weight_offset: float = 0.0,
    round_first: bool = False,
    quantize: str | None = None,
) -> Out:
    """(rmsnorm(x + residual), x + residual), step by step.

    x, residual: (T, H); weight: (H,); returns two (T, H), the first as codes with scales (T,) fp32 behind them if
    `quantize` is given.  Raises `ValueError` on wrong shapes or dtypes.
    """
    normed, new_residual, scale = outputs(out, check_operands(x, residual, weight), x, quantize)
    torch.add(x, residual, out=new_residual)
    values = norm(new_residual, weight, eps, weight_offset, round_first)
    if scale is None:
        normed.copy_(values)
    else:
        quantize_rows(values, normed, scale)
    return returned(normed, new_residual, scale)
