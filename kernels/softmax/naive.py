"""The softmax as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
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


@kernel(backend="torch", traffic=traffic)
def naive(x: Tensor, out: Tensor) -> None:
    """exp(x - max) / sum, step by step."""
    x32 = x.float()
    weights = torch.exp(x32 - x32.amax(dim=-1, keepdim=True))
    torch.div(weights, weights.sum(dim=-1, keepdim=True), out=out)
