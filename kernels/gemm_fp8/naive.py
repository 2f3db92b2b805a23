"""Implements the kernel `naive`: dequantizes both operands to fp32 in memory, then multiplies in fp32."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.gemm_fp8._operands import block_scaled
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_fp8 import GROUP_SIZE


@kernel(backend="torch")
def naive(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor, *, fast_accum: bool
) -> None:
    """Computes `(a_scale * a) @ (b_scale * b) + bias` in fp32, rounded to bf16 once.  Operands may have any strides."""
    K, N = b.shape
    if block_scaled(a_scale):
        a_scale = a_scale.repeat_interleave(GROUP_SIZE, 1)[:, :K]
        b_scale = b_scale.repeat_interleave(GROUP_SIZE, 0)[:K].repeat_interleave(GROUP_SIZE, 1)[:, :N]
    product = (a.float() * a_scale) @ (b.float() * b_scale)
    c.copy_(product if bias is None else product + bias.float())
