"""The activation of SwiGLU, written as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.silu_and_mul._operands import check_operands
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    x = inputs.x
    values = x.numel() // 2
    full, narrow = 4 * values, x.element_size() * values
    casts = [] if x.dtype == torch.float32 else [(narrow, full), (narrow, full)]  # gate, up to fp32
    return steps(
        *casts,
        (full, full),  # sigmoid
        (2 * full, full),  # gate * sigmoid
        (2 * full, narrow),  # * up
    )


@register(op="silu_and_mul", name="naive", role="naive", backend="torch", traffic=traffic)
def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """gate * sigmoid(gate) * up, step by step.

    x: (T, 2 I); returns (T, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    T, I = check_operands(x)
    out = output(out, (T, I), x)
    gate, up = x[:, :I].float(), x[:, I:].float()
    return torch.mul(gate * torch.sigmoid(gate), up, out=out)
