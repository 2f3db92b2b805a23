"""torch's scaled product: cuBLASLt on CUDA, oneDNN or a plain loop on the CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import scaled_mm_writes_between_rows
from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm_fp8._operands import block_scaled, traffic, why_no_tma
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_fp8 import GROUP
from rooflab.reference.spec import Arguments

MULTIPLE = 16
"""cuBLASLt needs N and K in multiples of this."""
BLOCK_K = 4 * GROUP
"""cuBLASLt reads 128 x 128 scales in columns of a multiple of four, and torch passes them without padding."""


def unsupported(inputs: Arguments) -> str | None:
    """Why `torch._scaled_mm` (2.11 to 2.13) cannot take the inputs (as its source and meta function say), or None."""
    a, b, a_scale, b_scale = inputs.a, inputs.b, inputs.a_scale, inputs.b_scale
    (K, N), M, blocks = b.shape, a.shape[0], block_scaled(a_scale)
    if a.device.type == "cpu":
        return "a_scale: expected one element, because torch has no block scales on a CPU" if blocks else None
    if K % MULTIPLE or N % MULTIPLE:
        return f"b: expected N and K in multiples of {MULTIPLE} for cuBLASLt, got {N} and {K}"
    # cuBLASLt needs of fp8 operands what TMA needs, and torch passes a view without a copy.
    reason = why_no_tma(inputs)
    if reason or not blocks:
        return reason
    if K % BLOCK_K:
        return f"a: expected K in multiples of {BLOCK_K} with block scales for cuBLASLt, got {K}"
    if inputs.bias is not None:
        return "bias: expected none with block scales, for which torch documents no bias"
    groups = K // GROUP
    if (a_scale.stride(0) != 1 and M > 1) or a_scale.stride(1) != M:
        return f"a_scale: expected the strides (1, {M}), got {a_scale.stride()}"
    if b_scale.stride(0) != 1 or (b_scale.stride(1) != groups and b_scale.shape[1] > 1):
        return f"b_scale: expected the strides (1, {groups}), got {b_scale.stride()}"
    return None


@kernel(
    backend="torch", traffic=traffic, unsupported=unsupported, aligned=("a", "b"), empty=epilogue_alone, allocates=True
)
def library(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor | None, *, fast_accum: bool
) -> Tensor:
    """`torch._scaled_mm` promotes its sums unless `fast_accum` is True; without a K it would leave out the bias."""
    product = partial(
        torch._scaled_mm, a, b, a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    gaps = c is not None and c.stride(0) != c.shape[1] and a.device.type == "cpu"
    if c is not None and gaps and scaled_mm_writes_between_rows():
        return c.copy_(product())
    return product(out=c)
