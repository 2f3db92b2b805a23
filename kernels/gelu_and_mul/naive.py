"""The activation of GeGLU, written as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows, written_bytes
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM, in fp32."""
    x = inputs.x
    values = x.numel() // 2
    full, narrow, rows = 4 * values, x.element_size() * values, 4 * x.shape[0]
    casts = [] if x.dtype == torch.float32 else [(narrow, full), (narrow, full)]  # gate, up to fp32
    last = [] if inputs.quantize is None else [(full, rows), (rows, rows), (full + rows, full)]
    return steps(
        *casts,
        *[(full, full)] * 2,  # gate^3, its factor
        (2 * full, full),  # + gate
        *[(full, full)] * 4,  # its factor, tanh, + 1, / 2
        (2 * full, full),  # * gate
        (2 * full, full),  # * up
        *last,
        (full, written_bytes(x, values, inputs.quantize)),
    )


@kernel(backend="torch", traffic=traffic)
def naive(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None) -> None:
    """gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up, step by step."""
    gate, up = x.float().chunk(2, dim=1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    write_rows(0.5 * gate * (1.0 + torch.tanh(inner)) * up, out, scale)
