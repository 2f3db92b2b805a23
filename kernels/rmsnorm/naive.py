"""The norm as a model's source code writes it: one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows, written_bytes
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, round_first: bool = False
) -> torch.Tensor:
    """The norm of x (T, H) in fp32, not rounded."""
    x32 = x.float()
    mean_square = x32.pow(2).mean(dim=-1, keepdim=True)  # (T, 1)
    normalized = x32 * torch.rsqrt(mean_square + eps)
    if round_first:
        normalized = normalized.to(x.dtype).float()
    return normalized * (weight.float() + weight_offset if weight_offset else weight.float())


def norm_moves(inputs: Arguments) -> list[tuple[float, float]]:
    """The bytes that each step of `norm` reads and writes, and the last one: a rounding, or a quantisation."""
    x, quantize = inputs.x, inputs.quantize
    T, H = x.shape
    full, rows, hidden, narrow = 4 * T * H, 4 * T, 4 * H, x.element_size() * T * H
    casts = [] if x.dtype == torch.float32 else [(narrow, full), (x.element_size() * H, hidden)]  # x, weight to fp32
    first = [(full, narrow), (narrow, full)] if inputs.round_first else []
    offset = [(hidden, hidden)] if inputs.weight_offset else []
    last = [] if quantize is None else [(full, rows), (rows, rows), (full + rows, full)]
    return [
        *casts,
        (full, full),  # square
        (full, rows),  # mean
        (rows, rows),  # + eps
        (rows, rows),  # rsqrt
        (full + rows, full),  # x * rsqrt
        *first,
        *offset,
        (full + hidden, full),  # * weight
        *last,
        (full, written_bytes(x, T * H, quantize)),
    ]


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    return steps(*norm_moves(inputs))


@kernel(backend="torch", traffic=traffic)
def naive(
    x: Tensor, weight: Tensor, out: Tensor, scale: Tensor | None, *,
    eps: float, weight_offset: float, round_first: bool, quantize: str | None,
) -> None:  # fmt: skip
    """x / rms(x) * (weight + weight_offset), step by step."""
    write_rows(norm(x, weight, eps, weight_offset, round_first), out, scale)
