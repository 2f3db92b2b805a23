"""RIGHT.  The gate's weight is e^-softplus(-2u), so that neither a sum nor a quotient of exponentials is
formed.  Rows are done in groups of 5, the last group first.  A quantised output gets its scale from the fp64
values."""

import math

import torch

from rooflab.kernels.registry import register


@register(op="gelu_and_mul", name="by_logarithms", role="optimized", backend="torch")
def gelu_and_mul(x, *, quantize=None):
    T, I = x.shape[0], x.shape[1] // 2
    values = torch.empty((T, I), dtype=torch.float64, device=x.device)
    for start in reversed(range(0, T, 5)):
        rows = x[start : start + 5].double()
        gate, up = rows[:, :I], rows[:, I:]
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
        values[start : start + 5] = gate * torch.exp(-torch.logaddexp(torch.zeros_like(gate), -2.0 * inner)) * up
    if quantize is None:
        return values.to(x.dtype)
    largest = values.abs().amax(dim=1) if I else values.new_zeros(T)
    most = 127.0 if quantize == "int8" else 448.0
    scale = torch.where(largest > 0, (largest / most).clamp(min=2.0**-126), 1.0)
    steps = values / scale[:, None]
    if quantize == "int8":
        return steps.round().clamp(-127, 127).to(torch.int8), scale.float()
    return steps.float().clamp(-448, 448).to(torch.float8_e4m3fn), scale.float()
