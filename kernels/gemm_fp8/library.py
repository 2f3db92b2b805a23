"""Implements `library`: `torch._scaled_mm`, which is cuBLASLt on CUDA, and oneDNN or a simple loop on the CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import scaled_mm_writes_between_rows
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm_fp8._operands import block_scaled, traffic, why_no_tma
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_fp8 import GROUP_SIZE
from rooflab.reference.spec import Arguments

SIZE_MULTIPLE = 16
"""For cuBLASLt, N and K must be multiples of this."""
BLOCK_K = 4 * GROUP_SIZE
"""With block scales, K must be a multiple of this.  cuBLASLt reads columns of scales by fours; torch does not pad."""


def unsupported(inputs: Arguments) -> str | None:
    """Returns why `torch._scaled_mm` refuses the inputs, or None (read in the source of torch 2.11 to 2.13)."""
    a, b, a_scale, b_scale = inputs.a, inputs.b, inputs.a_scale, inputs.b_scale
    (K, N), M, has_block_scales = b.shape, a.shape[0], block_scaled(a_scale)
    if a.device.type == "cpu":
        return "a_scale: expected one element, because torch has no block scales on a CPU" if has_block_scales else None
    if K % SIZE_MULTIPLE or N % SIZE_MULTIPLE:
        return f"b: expected N and K in multiples of {SIZE_MULTIPLE} for cuBLASLt, got {N} and {K}"
    # cuBLASLt has TMA's requirements for fp8 operands, and torch passes a view without a copy.
    refusal_reason = why_no_tma(inputs)
    if refusal_reason or not has_block_scales:
        return refusal_reason
    if K % BLOCK_K:
        return f"a: expected K in multiples of {BLOCK_K} with block scales for cuBLASLt, got {K}"
    if inputs.bias is not None:
        return "bias: expected none with block scales, for which torch documents no bias"
    k_groups = K // GROUP_SIZE
    if (a_scale.stride(0) != 1 and M > 1) or a_scale.stride(1) != M:
        return f"a_scale: expected the strides (1, {M}), got {a_scale.stride()}"
    if b_scale.stride(0) != 1 or (b_scale.stride(1) != k_groups and b_scale.shape[1] > 1):
        return f"b_scale: expected the strides (1, {k_groups}), got {b_scale.stride()}"
    return None


@kernel(
    backend="torch", traffic=traffic, unsupported=unsupported, aligned=("a", "b"), empty=epilogue_alone, allocates=True
)
def library(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor | None, *, fast_accum: bool
) -> Tensor:
    """Calls `torch._scaled_mm`, which adds partial sums in fp32 unless `fast_accum` is set.  Does not support K = 0."""
    scaled_product = partial(
        torch._scaled_mm, a, b, a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    has_row_gaps = c is not None and c.stride(0) != c.shape[1] and a.device.type == "cpu"
    if c is not None and has_row_gaps and scaled_mm_writes_between_rows():
        return c.copy_(scaled_product())
    return scaled_product(out=c)
