"""The kernel `native`, the rung after `packed`, in C++: loads turn codes into fp32; a scale multiplies a column's sum.

The codes are in panels.  With one row, only the bytes of the codes matter.  No weight is rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels.gemm import native as native_gemm
from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm.native import Panels
from rooflab.kernels.launcher import kernel
from rooflab.reference.rules import check_dtype
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def pack(b: torch.Tensor, scale: torch.Tensor) -> Panels:
    """Packs codes (K, N) int8 in panels, with scales (N,) in fp32.  Raises `ValueError` on other dtypes or shapes."""
    check_dtype("b", b, torch.int8)
    return replace(native_gemm.pack(b), scales=scale.float().contiguous())


def traffic(inputs: Arguments) -> Traffic:
    """Counts every operand once, because the weight was packed at load."""
    a, (K, N) = inputs.a, inputs.b.shape
    return Traffic(nbytes(a, inputs.scale, inputs.bias) + K * N, len(a) * N * a.element_size())


@kernel(
    backend="cpp",
    devices=("cpu",),
    prepare=pack,
    packed=Panels,
    bind=native_gemm.shape,
    traffic=traffic,
    holds=along_k("a"),
)
def native(a: Tensor, b: Panels, scale: Tensor, bias: Tensor | None, c: Tensor, *, bound: Any) -> None:
    """Computes `a @ (scale * b) + bias` in fp32, rounded once.  `b` is from `pack` and contains the scales."""
    native_gemm.product(a, b, bias, c, bound)
