"""The activation of SwiGLU, written as its formula: one torch call per step, in fp32."""

from __future__ import annotations

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
        (full, full),  # sigmoid
        (2 * full, full),  # gate * sigmoid
        (2 * full, full),  # * up
        *last,
        (full, written_bytes(x, values, inputs.quantize)),
    )


@kernel(backend="torch", traffic=traffic)
def naive(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None) -> None:
    """gate * sigmoid(gate) * up, step by step."""
    gate, up = x.float().chunk(2, dim=1)
    write_rows(gate * torch.sigmoid(gate) * up, out, scale)
