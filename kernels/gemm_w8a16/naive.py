"""The kernel `naive`, an engineer's first version, dequantizes the weight to bf16 in memory, and calls torch's mm."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel


@kernel(backend="torch", unsupported=padded_rows_refused, allocates=True)
def naive(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """Computes `a @ (scale * b) + bias`, with `scale * b` rounded to bf16."""
    weight = (b.float() * scale.float()).bfloat16()
    return torch.mm(a, weight, out=c) if bias is None else torch.addmm(bias, a, weight, out=c)
