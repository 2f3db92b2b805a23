"""Implements the kernel `naive`: dequantizes the weight to bf16 in memory, and calls torch's mm."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel
from rooflab.reference.quantization import INT4_ZERO, spread, unpack_int4


@kernel(backend="torch", unsupported=padded_rows_refused, allocates=True)
def naive(a: Tensor, b: Tensor, scale: Tensor, minimum: Tensor | None, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """Computes `a @ W^T + bias`.  The weight `W = scale * code - minimum` is rounded to bf16."""
    K = a.shape[1]
    group = K // max(scale.shape[1], 1)
    codes = (unpack_int4(b) if b.dtype == torch.uint8 else b).float()
    if minimum is None and b.dtype == torch.uint8:
        codes -= INT4_ZERO
    weight = codes * spread(scale.float(), group, K)
    if minimum is not None:
        weight -= spread(minimum.float(), group, K)
    weight_t = weight.bfloat16().mT
    return torch.mm(a, weight_t, out=c) if bias is None else torch.addmm(bias, a, weight_t, out=c)
