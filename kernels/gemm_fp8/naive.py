"""What an engineer would write first: both operands dequantized to fp32 in memory, and one fp32 product."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.gemm_fp8._operands import block_scaled
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_fp8 import GROUP
from rooflab.reference.spec import Arguments, nbytes
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


@kernel(backend="torch", traffic=traffic)
def naive(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor, *, fast_accum: bool
) -> None:
    """(a_scale a) (b_scale b) + bias in fp32, rounded to bf16 once; operands of any strides."""
    K, N = b.shape
    if block_scaled(a_scale):
        a_scale = a_scale.repeat_interleave(GROUP, 1)[:, :K]
        b_scale = b_scale.repeat_interleave(GROUP, 0)[:K].repeat_interleave(GROUP, 1)[:, :N]
    product = (a.float() * a_scale) @ (b.float() * b_scale)
    c.copy_(product if bias is None else product + bias.float())
