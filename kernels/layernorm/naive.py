"""The norm as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    x, bias = inputs.x, inputs.bias
    T, H = x.shape
    full, rows, hidden, narrow = 4 * T * H, 4 * T, 4 * H, x.element_size() * T * H
    vectors = 1 if bias is None else 2
    casts = [] if x.dtype == torch.float32 else [(narrow, full), *[(x.element_size() * H, hidden)] * vectors]
    return steps(
        *casts,
        (full, rows),  # mean
        (full + rows, full),  # x - mean
        (full, full),  # square
        (full, rows),  # variance
        (rows, rows),  # + eps
        (rows, rows),  # rsqrt
        (full + rows, full),  # * rsqrt
        (full + hidden, full),  # * weight
        *([] if bias is None else [(full + hidden, full)]),
        (full, narrow),
    )


@kernel(backend="torch", traffic=traffic)
def naive(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, eps: float) -> None:
    """(x - mean) / sqrt(variance + eps) * weight + bias, step by step."""
    x32 = x.float()
    centred = x32 - x32.mean(dim=-1, keepdim=True)
    variance = centred.pow(2).mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt(variance + eps) * weight.float()
    out.copy_(scaled if bias is None else scaled + bias.float())
