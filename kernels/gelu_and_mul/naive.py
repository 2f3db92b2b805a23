"""Implements the kernel `naive`: the formula of GeGLU's activation, with one torch call per step, in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows
from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None) -> None:
    """Computes `gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3))) * up`, step by step."""
    gate, up = x.float().chunk(2, dim=1)
    tanh_argument = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    write_rows(0.5 * gate * (1.0 + torch.tanh(tanh_argument)) * up, out, scale)
