"""The kernel `naive`, an engineer's first version, dequantizes the weight to bf16 in memory, and calls torch's mm."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.quantization import INT4_ZERO


@kernel(backend="torch", unsupported=padded_rows_refused, allocates=True)
def naive(a: Tensor, b: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """Computes `a @ W + bias`.  The weight `W = (code - zero) * scale` is rounded to bf16."""
    K = a.shape[1]
    group_values = group_size(K, scale.shape[1])
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).float()
    zero_points = INT4_ZERO if zero is None else zero.float().repeat_interleave(group_values, dim=1)[:, :K]
    weight = ((codes - zero_points) * scale.float().repeat_interleave(group_values, dim=1)[:, :K]).bfloat16().mT
    return torch.mm(a, weight, out=c) if bias is None else torch.addmm(bias, a, weight, out=c)
