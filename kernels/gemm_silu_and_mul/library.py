"""The three torch calls that a user would make without this op: one product of gate|up, then `silu` and `mul`."""

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
    """The product writes both halves, which the activation reads back; silu(gate) is written and read too."""
    a, b = inputs.a, inputs.b
    half = a.shape[0] * (b.shape[1] // 2) * a.element_size()
    return steps((nbytes(a, b), 2 * half), (half, half), (2 * half, half))


@register(
    op="gemm_silu_and_mul", name="library", role="library", backend="torch", traffic=traffic,
    unsupported=padded_rows_refused,
)  # fmt: skip
def gemm_silu_and_mul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(a gate) * (a up) with `torch.mm`, `silu` and `torch.mul`; gate, up and silu(gate) are rounded to the dtype.

    a: (M, K); b: (K, 2 I); returns (M, I).  Raises `ValueError` on a wrong shape or dtype.
    """
    M, I, _ = check_operands(a, b)
    check_rows(a)
    if out is not None:
        output(out, (M, I), a)
    product = torch.mm(a, b)
    return torch.mul(torch.nn.functional.silu(product[:, :I]), product[:, I:], out=out)
