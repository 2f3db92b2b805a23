"""torch's scaled product: cuBLASLt on CUDA, oneDNN or a plain loop on the CPU."""

from __future__ import annotations

from functools import partial

import torch

from rooflab.kernels._checks import output
from rooflab.kernels._torch_cpu import scaled_mm_writes_between_rows
from rooflab.kernels.gemm_fp8._operands import block_scaled, check_operands, traffic, why_no_tma
from rooflab.kernels.registry import Arguments, register
from rooflab.reference.gemm_fp8 import GROUP

MULTIPLE = 16
"""cuBLASLt needs N and K in multiples of this."""
BLOCK_K = 4 * GROUP
"""cuBLASLt reads 128 x 128 scales in columns of a multiple of four, and torch passes them without padding."""


def unsupported(inputs: Arguments) -> str | None:
    """Why `torch._scaled_mm` (2.11 to 2.13) cannot take the inputs (as its source and meta function say), or None."""
    a, b, a_scale = inputs.a, inputs.b, inputs.a_scale
    if a.device.type == "cpu":
        return "torch has no block scales on a CPU" if block_scaled(a_scale) else None
    K, N = b.shape
    if K % MULTIPLE or N % MULTIPLE:
        return f"cuBLASLt takes N and K in multiples of {MULTIPLE}, got {N} and {K}"
    # cuBLASLt needs of fp8 operands what TMA needs, and torch passes a view without a copy.
    reason = why_no_tma(a, b)
    if reason is None and block_scaled(a_scale):
        reason = _why_no_blocks(a, b, a_scale, inputs.b_scale, inputs.bias)
    return reason


def _why_no_blocks(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    M, K = a.shape
    if K % BLOCK_K:
        return f"cuBLASLt takes block scales with K in multiples of {BLOCK_K}, got {K}"
    if bias is not None:
        return "torch documents no bias with block scales"
    groups = K // GROUP
    if (a_scale.stride(0) != 1 and M > 1) or a_scale.stride(1) != M:
        return f"a_scale: expected the strides (1, {M}), got {a_scale.stride()}"
    if b_scale.stride(0) != 1 or (b_scale.stride(1) != groups and b_scale.shape[1] > 1):
        return f"b_scale: expected the strides (1, {groups}), got {b_scale.stride()}"
    return None


@register(op="gemm_fp8", name="library", role="library", backend="torch", traffic=traffic, unsupported=unsupported)
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
    """(a_scale a) (b_scale b) + bias with `torch._scaled_mm`, which promotes its sums unless `fast_accum` is True.

    a: (M, K) e4m3 row-major; b: (K, N) e4m3 column-major; bias: (N,) bf16; scales as for `naive`, block scales
    contiguous along the rows of a and along the K of b; returns (M, N) bf16.  Raises `ValueError` on wrong shapes or
    dtypes.
    """
    M, N, K = check_operands(a, b, a_scale, b_scale, bias)
    if out is not None or not K:
        out = output(out, (M, N), a, torch.bfloat16)
    if out is not None and not K:  # torch would leave out the bias
        return out.zero_() if bias is None else out.copy_(bias.expand(M, N))
    product = partial(
        torch._scaled_mm, a, b, a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    if out is not None and out.stride(0) != N and a.device.type == "cpu" and scaled_mm_writes_between_rows():
        return out.copy_(product())
    return product(out=out)
