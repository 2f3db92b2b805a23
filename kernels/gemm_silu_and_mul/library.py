"""The three torch calls that a user would make without this op: one product of gate|up, then `silu` and `mul`."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """The product writes both halves, which the activation reads back; silu(gate) is written and read too."""
    a, b = inputs.a, inputs.b
    half = a.shape[0] * (b.shape[1] // 2) * a.element_size()
    return steps((nbytes(a, b), 2 * half), (half, half), (2 * half, half))


@kernel(backend="torch", traffic=traffic, unsupported=padded_rows_refused, allocates=True)
def library(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """`torch.mm`, `silu` and `torch.mul`; gate, up and silu(gate) are rounded to the dtype."""
    product, I = torch.mm(a, b), b.shape[1] // 2
    return torch.mul(torch.nn.functional.silu(product[:, :I]), product[:, I:], out=out)
