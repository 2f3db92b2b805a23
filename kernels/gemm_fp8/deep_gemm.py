"""Wraps DeepGEMM's fp8 product with block scales (https://github.com/deepseek-ai/DeepGEMM) as a comparison kernel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from rooflab.kernels.gemm._operands import epilogue_alone
from rooflab.kernels.gemm_fp8._operands import HAS_BLOCK_SCALES, traffic, why_not_operands
from rooflab.kernels.launcher import kernel
from rooflab.reference.gemm_fp8 import GROUP_SIZE

SIZE_MULTIPLE = 8
"""N must be a multiple of this: TMA needs row strides of a bf16 output that are multiples of 16 bytes."""


@kernel(
    role="peer",
    backend="cuda",
    min_sm=90,
    devices=("cuda",),
    requires=("deep_gemm",),
    unsupported=why_not_operands,
    holds={
        HAS_BLOCK_SCALES: "block scales for DeepGEMM",
        (
            f"(b_scale[0] == 1 or K <= {GROUP_SIZE}) and (b_scale[1] == -(-K // {GROUP_SIZE}) or N <= {GROUP_SIZE})"
            " or K * N == 0"
        ): (f"columns of K / {GROUP_SIZE} scales, one after another"),
    },
    off={"bias": "DeepGEMM adds no bias to a bf16 result"},
    limits={"N": range(0, 2**31, SIZE_MULTIPLE)},
    aligned=("a", "b"),
    empty=epilogue_alone,
    traffic=traffic,
)
def deep_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, c: Tensor, *, fast_accum: bool
) -> None:
    """Calls `deep_gemm.fp8_gemm_nt`, which takes `b.mT` and `b_scale.mT`.  DeepGEMM copies `a_scale` in another launch.
    It needs no copy if `a_scale` is stored as `[K / 128, M]` and M is a multiple of four."""
    deep_gemm_module: Any = import_module("deep_gemm")
    deep_gemm_module.fp8_gemm_nt((a, a_scale), (b.mT, b_scale.mT), c)
