"""The kernel `naive` computes the activation of SwiGLU by its formula, with one torch call per step, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._rows import write_rows
from rooflab.kernels.launcher import kernel


@kernel(backend="torch")
def naive(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None) -> None:
    """Computes `gate * sigmoid(gate) * up`, step by step."""
    gate, up = x.float().chunk(2, dim=1)
    write_rows(gate * torch.sigmoid(gate) * up, out, scale)
