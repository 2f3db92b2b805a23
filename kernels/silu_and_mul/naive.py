"""The activation of SwiGLU, written as its formula: one torch call per step, in fp32."""

from __future__ import annotations

import torch

from rooflab.kernels._rows import quantize_rows, row_outputs, written_bytes
from rooflab.kernels._traffic import steps
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.silu_and_mul._operands import check_operands
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


@register(op="silu_and_mul", name="naive", role="naive", backend="torch", traffic=traffic)
def silu_and_mul(
    x: torch.Tensor, out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None, *, quantize: str | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """gate * sigmoid(gate) * up, step by step.

    x: (T, 2 I); returns (T, I), or with `quantize` codes (T, I) and scales (T,) fp32.  Raises `ValueError` on a wrong
    shape or dtype.
    """
    T, I = check_operands(x)
    result, scale = row_outputs(out, (T, I), x, quantize)
    gate, up = x[:, :I].float(), x[:, I:].float()
    values = gate * torch.sigmoid(gate) * up
    if scale is None:
        return result.copy_(values)
    quantize_rows(values, result, scale)
    return result, scale
