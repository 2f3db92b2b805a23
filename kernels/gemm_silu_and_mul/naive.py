"""Implements `naive`: a product for gate, a product for up, then the activation in steps, as in a model's code."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel


@kernel(backend="torch", unsupported=padded_rows_refused)
def naive(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Computes `silu(a @ gate) * (a @ up)` by two calls of `torch.mm` and an activation in fp32, step by step."""
    I = out.shape[1]
    gate, up = torch.mm(a, b[:, :I]).float(), torch.mm(a, b[:, I:]).float()
    torch.mul(gate * torch.sigmoid(gate), up, out=out)
