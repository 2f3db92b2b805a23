"""What an engineer would write first: the weight dequantized to bf16 in memory, and torch's product."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Codes to fp32, scaled, to bf16, and read by the product: 21 bytes per weight of one byte."""
    a, b = inputs.a, inputs.b
    codes = b.numel()
    return steps(
        (codes, 4 * codes),
        (4 * codes + nbytes(inputs.scale), 4 * codes),
        (4 * codes, 2 * codes),
        (nbytes(a, inputs.bias) + 2 * codes, a.shape[0] * b.shape[1] * a.element_size()),
    )


@kernel(backend="torch", traffic=traffic, unsupported=padded_rows_refused, allocates=True)
def naive(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor | None, c: Tensor | None) -> Tensor:
    """a (scale b) + bias, with scale b rounded to bf16."""
    weight = (b.float() * scale.float()).bfloat16()
    return torch.mm(a, weight, out=c) if bias is None else torch.addmm(bias, a, weight, out=c)
