"""The gated product as a model's code writes it: a product for gate, one for up, then the activation step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM; the activation's steps are fp32."""
    a, b = inputs.a, inputs.b
    values = a.shape[0] * (b.shape[1] // 2)
    full, narrow = 4 * values, a.element_size() * values
    casts = [] if a.dtype == torch.float32 else [(narrow, full), (narrow, full)]  # gate, up to fp32
    product = (nbytes(a) + nbytes(b) / 2, narrow)
    return steps(
        product,
        product,
        *casts,
        (full, full),  # sigmoid
        (2 * full, full),  # gate * sigmoid
        (2 * full, narrow),  # * up
    )


@kernel(backend="torch", traffic=traffic, unsupported=padded_rows_refused)
def naive(a: Tensor, b: Tensor, out: Tensor) -> None:
    """silu(a gate) * (a up) with `torch.mm` twice and the activation in fp32, step by step."""
    I = out.shape[1]
    gate, up = torch.mm(a, b[:, :I]).float(), torch.mm(a, b[:, I:]).float()
    torch.mul(gate * torch.sigmoid(gate), up, out=out)
