"""RMSNorm as a model's source code writes it: one torch call per step, in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rmsnorm._operands import check_operands
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    x = inputs.x
    T, H = x.shape
    full, rows, hidden = 4 * T * H, 4 * T, 4 * H
    narrow = x.element_size() * T * H
    casts = [] if x.dtype == torch.float32 else [(narrow, full), (x.element_size() * H, hidden)]  # x, weight to fp32
    return steps(
        *casts,
        (full, full),  # square
        (full, rows),  # mean
        (rows, rows),  # + eps
        (rows, rows),  # rsqrt
        (full + rows, full),  # x * rsqrt
        (full + hidden, narrow),  # * weight
    )


@register(op="rmsnorm", name="naive", role="naive", backend="torch", traffic=traffic)
def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) * weight, step by step.

    x: (T, H); weight: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    T, H = check_operands(x, weight)
    out = output(out, (T, H), x)
    x32 = x.float()
    mean_square = x32.pow(2).mean(dim=-1, keepdim=True)  # (T, 1)
    normalized = x32 * torch.rsqrt(mean_square + eps)
    return torch.mul(normalized, weight.float(), out=out)
