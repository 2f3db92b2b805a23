"""The gated product as a model's code writes it: a product for gate, one for up, then the activation step by step."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_silu_and_mul._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
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


@register(
    op="gemm_silu_and_mul", name="naive", role="naive", backend="torch", traffic=traffic,
    unsupported=padded_rows_refused,
)  # fmt: skip
def gemm_silu_and_mul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(a gate) * (a up) with `torch.mm` twice and the activation in fp32, step by step.

    a: (M, K); b: (K, 2 I); returns (M, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    M, I, _ = check_operands(a, b)
    check_rows(a)
    out = output(out, (M, I), a)
    gate, up = torch.mm(a, b[:, :I]).float(), torch.mm(a, b[:, I:]).float()
    return torch.mul(gate * torch.sigmoid(gate), up, out=out)
