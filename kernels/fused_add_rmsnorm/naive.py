"""The residual add and the norm as a model's source code writes them: one torch call per step, the norm in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.kernels.rmsnorm.naive import norm, norm_moves
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32 after the add."""
    narrow = inputs.x.element_size() * inputs.x.numel()
    return steps((2 * narrow, narrow), *norm_moves(inputs))


@kernel(backend="torch", traffic=traffic)
def naive(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, new_residual: Tensor, scale: Tensor | None, *,
    eps: float, weight_offset: float, round_first: bool, quantize: str | None,
) -> None:  # fmt: skip
    """(rmsnorm(x + residual), x + residual), step by step."""
    torch.add(x, residual, out=new_residual)
    write_rows(norm(new_residual, weight, eps, weight_offset, round_first), out, scale)
