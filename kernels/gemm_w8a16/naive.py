"""What an engineer would write first: the weight dequantized to bf16 in memory, and torch's product."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_w8a16._operands import check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
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


@register(
    op="gemm_w8a16", name="naive", role="naive", backend="torch", traffic=traffic,
    unsupported=padded_rows_refused,
)  # fmt: skip
def gemm_w8a16(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a (scale b) + bias, with scale b rounded to bf16.

    a: (M, K) bf16; b: (K, N) int8; any strides of both; scale: (N,) fp32, fp16 or bf16; bias: (N,) bf16; returns (M, N)
    bf16.  Raises `ValueError` on wrong shapes or dtypes.
    """
    M, N, _ = check_operands(a, b, scale, bias)
    check_rows(a)
    if out is not None:
        output(out, (M, N), a)
    weight = (b.float() * scale.float()).bfloat16()
    return torch.mm(a, weight, out=out) if bias is None else torch.addmm(bias, a, weight, out=out)
