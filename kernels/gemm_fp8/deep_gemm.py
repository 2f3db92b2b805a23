"""DeepGEMM's fp8 product with block scales (https://github.com/deepseek-ai/DeepGEMM), if it is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from rooflab.kernels._checks import output
from rooflab.kernels.gemm_fp8._operands import block_scaled, check_operands, traffic, why_no_tma
from rooflab.kernels.registry import Arguments, register

MULTIPLE = 8
"""N is a multiple of this, so that rows of a bf16 output are a multiple of 16 bytes apart, as TMA needs."""


def unsupported(inputs: Arguments) -> str | None:
    """Why `fp8_gemm_nt` cannot take the operands on Hopper (its source asserts this), or None."""
    b, b_scale = inputs.b, inputs.b_scale
    if not block_scaled(inputs.a_scale):
        return "a_scale: DeepGEMM takes only block scales"
    if inputs.bias is not None:
        return "bias: DeepGEMM adds no bias to a bf16 result"
    if b.shape[1] % MULTIPLE:
        return f"b: expected columns in multiples of {MULTIPLE}, got {b.shape[1]}"
    if not b_scale.mT.is_contiguous():
        return f"b_scale: expected the strides (1, {b_scale.shape[0]}), got {b_scale.stride()}"
    return why_no_tma(inputs.a, b)


@register(
    op="gemm_fp8", name="deep_gemm", role="peer", backend="cuda", min_sm=90, devices=("cuda",), requires=("deep_gemm",),
    traffic=traffic, unsupported=unsupported,
)  # fmt: skip
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
    """(a_scale a) (b_scale b) with `deep_gemm.fp8_gemm_nt`, which takes `b.mT` and `b_scale.mT`.

    a: (M, K) e4m3 row-major; b: (K, N) e4m3 column-major; block scales, those of b contiguous along K; returns (M, N)
    bf16.  Unless a_scale is stored as (K / 128, M) with M a multiple of four, DeepGEMM copies it in one more launch.
    Raises `ValueError` on wrong shapes or dtypes.
    """
    M, N, K = check_operands(a, b, a_scale, b_scale, bias)
    out = output(out, (M, N), a, torch.bfloat16)
    if not K:
        return out.zero_()
    if out.numel():
        library: Any = import_module("deep_gemm")
        library.fp8_gemm_nt((a, a_scale), (b.mT, b_scale.mT), out)
    return out
