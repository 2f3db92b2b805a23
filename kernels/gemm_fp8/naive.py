"""What an engineer would write first: both operands dequantized to fp32 in memory, and one fp32 product."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_fp8._operands import block_scaled, check_operands
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.gemm_fp8 import GROUP
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """Every step reads its operands from HBM and writes its result to HBM; block scales are expanded to full size."""
    a, b, a_scale, bias = inputs.a, inputs.b, inputs.a_scale, inputs.bias
    M, N = a.shape[0], b.shape[1]
    wide_a, wide_b, product = 4 * a.numel(), 4 * b.numel(), 4 * M * N
    a_scales, b_scales = nbytes(a_scale), nbytes(inputs.b_scale)
    moves = [(nbytes(a), wide_a), (nbytes(b), wide_b)]  # to fp32
    if block_scaled(a_scale):
        tall = b_scales * GROUP
        moves += [(a_scales, wide_a), (b_scales, tall), (tall, wide_b)]  # expanded
        a_scales, b_scales = wide_a, wide_b
    moves += [(wide_a + a_scales, wide_a), (wide_b + b_scales, wide_b)]  # scaled
    moves += [(wide_a + wide_b, product)]
    if bias is not None:
        moves += [(product + nbytes(bias), product)]
    return steps(*moves, (product, 2 * M * N))


@register(op="gemm_fp8", name="naive", role="naive", backend="torch", traffic=traffic)
def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fast_accum: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """(a_scale a) (b_scale b) + bias in fp32, rounded to bf16 once.

    a: (M, K) e4m3; b: (K, N) e4m3, any strides of both; bias: (N,) bf16; fp32 scales of one element, or of blocks:
    a_scale (M, ceil(K / 128)), b_scale (ceil(K / 128), ceil(N / 128)); returns (M, N) bf16.  Raises `ValueError` on
    wrong shapes or dtypes.
    """
    M, N, K = check_operands(a, b, a_scale, b_scale, bias)
    out = output(out, (M, N), a, torch.bfloat16)
    if block_scaled(a_scale):
        a_scale = a_scale.repeat_interleave(GROUP, 1)[:, :K]
        b_scale = b_scale.repeat_interleave(GROUP, 0)[:K].repeat_interleave(GROUP, 1)[:, :N]
    product = (a.float() * a_scale) @ (b.float() * b_scale)
    if bias is not None:
        product = product + bias.float()
    return out.copy_(product)
