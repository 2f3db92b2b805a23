"""The softmax as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.softmax._operands import check_operands
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    x = inputs.x
    full, rows, narrow = 4 * x.numel(), 4 * x.shape[0], x.element_size() * x.numel()
    casts = [] if x.dtype == torch.float32 else [(narrow, full)]
    return steps(
        *casts,
        (full, rows),  # maximum
        (full + rows, full),  # x - maximum
        (full, full),  # exp
        (full, rows),  # sum
        (full + rows, narrow),  # / sum
    )


@register(op="softmax", name="naive", role="naive", backend="torch", traffic=traffic)
def softmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """exp(x - max) / sum, step by step.

    x: (T, H), each row with a finite value; returns (T, H).  Raises `ValueError` on a wrong shape or dtype.
    """
    out = output(out, check_operands(x), x)
    if not out.numel():
        return out
    x32 = x.float()
    weights = torch.exp(x32 - x32.amax(dim=-1, keepdim=True))
    return torch.div(weights, weights.sum(dim=-1, keepdim=True), out=out)
