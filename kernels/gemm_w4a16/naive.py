"""What an engineer would write first: the weight unpacked and dequantized to bf16 in memory, and torch's product."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_w4a16 import group_size
from rooflab.reference.quantization import INT4_ZERO
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM; scales and zeros are expanded to fp32."""
    a, b, zero = inputs.a, inputs.b, inputs.zero
    codes = 2 * b.numel()
    wide = 4 * codes
    moves: list[tuple[float, float]] = [(nbytes(b), nbytes(b)), (nbytes(b), nbytes(b)), (codes, codes)]  # halves
    moves += [(codes, wide), (nbytes(inputs.scale), wide)]
    if zero is not None:
        moves += [(nbytes(zero), wide)]
    moves += [(wide * (1 if zero is None else 2), wide), (2 * wide, wide), (wide, 2 * codes)]
    return steps(*moves, (nbytes(a, inputs.bias) + 2 * codes, a.shape[0] * b.shape[0] * a.element_size()))


@kernel(backend="torch", traffic=traffic, unsupported=padded_rows_refused, allocates=True)
def naive(a: Tensor, b: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """a W + bias, with W = (code - zero) scale rounded to bf16."""
    K = a.shape[1]
    group = group_size(K, scale.shape[1])
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).float()
    least = INT4_ZERO if zero is None else zero.float().repeat_interleave(group, dim=1)[:, :K]
    weight = ((codes - least) * scale.float().repeat_interleave(group, dim=1)[:, :K]).bfloat16().mT
    return torch.mm(a, weight, out=c) if bias is None else torch.addmm(bias, a, weight, out=c)
