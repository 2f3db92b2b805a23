"""What an engineer would write first: the weight unpacked and dequantized to bf16 in memory, and torch's product."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import check_rows, padded_rows_refused
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_w4a16._operands import SYMMETRIC_ZERO, check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.spec import nbytes
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


@register(
    op="gemm_w4a16", name="naive", role="naive", backend="torch", traffic=traffic,
    unsupported=padded_rows_refused,
)  # fmt: skip
def gemm_w4a16(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """a W + bias, with W = (code - zero) scale rounded to bf16.

    a: (M, K) bf16; b: (N, K/2) uint8; scale: (N, ceil(K / group)) fp32, fp16 or bf16; zero: uint8 of that shape, or
    None for 8; any strides of these; bias: (N,) bf16; returns (M, N) bf16.  Raises `ValueError` on wrong shapes or
    dtypes.
    """
    M, N, K, group = check_operands(a, b, scale, zero, bias)
    check_rows(a)
    if out is not None:
        output(out, (M, N), a)
    codes = torch.stack((b & 15, b >> 4), dim=-1).flatten(1).float()
    least = SYMMETRIC_ZERO if zero is None else zero.float().repeat_interleave(group, dim=1)[:, :K]
    weight = ((codes - least) * scale.float().repeat_interleave(group, dim=1)[:, :K]).bfloat16().mT
    return torch.mm(a, weight, out=out) if bias is None else torch.addmm(bias, a, weight, out=out)
